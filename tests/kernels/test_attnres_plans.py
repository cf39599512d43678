"""Plans of the mixture's kernels for Hopper: what a multiprocessor has must suffice."""

from __future__ import annotations

import pytest

from farhorizon.kernels.attnres import plans


@pytest.mark.parametrize("sources", [1, 2, 3, 6, 9, 17])
@pytest.mark.parametrize("width", [256, 264, 512, 1536, 2048, 4096, 7168, 8192])
def test_rows_in_shared_memory_and_registers_fit(width: int, sources: int) -> None:
    for updated in (False, True):
        plan = plans.forward_plan(width, sources, updated)
        assert plan is not None
        tile, programs = plan
        assert tile["GROUP"] > updated and tile["RING"] >= 2
        fits(tile, programs, tile["GROUP"] * tile["RING"])
    plan = plans.backward_plan(width, sources)
    if plan is None:
        assert width > 2048 and sources == 17
        return
    tile, programs = plan
    assert 1 <= tile["RING"] <= tile["SETS"] * sources and tile["KEPT"] > 2 * sources
    fits(tile, programs, tile["SETS"] * (sources + 1) + tile["RING"])


def fits(tile: dict[str, int], programs: int, rows: int) -> None:
    elements = tile["WARPS"] * tile["COLS"]
    assert tile["D"] <= elements < 2 * max(tile["D"], plans.NARROWEST)
    assert programs * (2 * rows * elements + 1024) < 228 * 1024
    assert programs * 32 * tile["num_warps"] * tile["maxnreg"] <= 65536


def test_a_wide_row_of_nine_sources_has_a_multiprocessor_to_itself() -> None:
    tile, programs = plans.backward_plan(7168, 9) or ({}, 0)
    assert (tile["WARPS"], tile["COLS"], programs) == (16, 512, 1)  # 8192 elements, 16 a thread
    assert tile["SETS"] * 10 + tile["RING"] == 14  # of 16 KiB: 15 would take 240


@pytest.mark.parametrize("width", [64, 1001, 9000])
def test_other_rows_take_the_plain_kernels(width: int) -> None:
    assert plans.forward_plan(width, 2, True) is None and plans.backward_plan(width, 2) is None
