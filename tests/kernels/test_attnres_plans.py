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


def shape(plan: tuple[dict[str, int], int] | None) -> tuple[int, ...]:
    tile, programs = plan or ({}, 0)
    return tile["WARPS"], tile["COLS"], programs


def test_two_programs_are_on_a_multiprocessor_wide_as_rows_may_be() -> None:
    """One computes while the other waits at a barrier; three groups of rows are on their way."""
    assert shape(plans.forward_plan(2048, 9, True)) == (4, 512, 5)
    assert shape(plans.forward_plan(7168, 9, True)) == (8, 1024, 2)
    tile, _ = plans.forward_plan(7168, 9, True) or ({}, 0)
    # of 16 KiB: 6 rows of one program, for 7 of both take 224, and their sums are beyond that
    assert (tile["GROUP"], tile["RING"], tile["maxnreg"]) == (2, 3, 128)


def test_two_rows_are_held_on_the_way_back_where_eight_warps_remain() -> None:
    plan = plans.backward_plan(2048, 9)
    assert shape(plan) == (4, 512, 2)
    assert plan is not None and plan[0]["SETS"] == 2  # 24 rows of 4 KiB, twice
    plan = plans.backward_plan(7168, 3)
    assert shape(plan) == (8, 1024, 1)
    assert plan is not None and plan[0]["SETS"] == 2  # 12 rows of 16 KiB
    plan = plans.backward_plan(7168, 9)
    assert shape(plan) == (16, 512, 1)
    assert plan is not None and plan[0]["SETS"] == 1  # 24 rows would take 384 KiB


@pytest.mark.parametrize("width", [64, 1001, 9000])
def test_other_rows_take_the_plain_kernels(width: int) -> None:
    assert plans.forward_plan(width, 2, True) is None and plans.backward_plan(width, 2) is None
