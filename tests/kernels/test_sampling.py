"""Kernels of a decode step that draw and count, beside torch and numpy, in Triton's interpreter
where there is no GPU, else compiled."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are decorated, below
import triton.experimental.gluon  # noqa: E402, F401  # in the same mode: launches look into it

from farhorizon.kernels.sampling import (  # noqa: E402
    advance_,
    draw_tokens,
    fused,
    naive_advance,
    naive_draw_tokens,
    naive_stream_points,
    stream_points,
)

os.environ.pop("TRITON_INTERPRET", None)

DEVICE = "cuda" if GPU else "cpu"
Tensor = torch.Tensor


def draw(width: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(width)
    heat = torch.rand(48, dtype=torch.float64) + 0.3
    heat[::5], heat[::7] = 0.0, 1.0
    point = torch.rand(48, dtype=torch.float64)
    point[0], point[1] = 0.0, 1.0 - 2.0**-53
    logits = torch.randn(48, width) * 3
    return logits.to(DEVICE), heat.to(DEVICE), point.to(DEVICE)


@pytest.mark.parametrize("width", [5, 64, 100, 300])
def test_the_kernel_draws_what_torch_draws(
    width: int, monkeypatch: pytest.MonkeyPatch, loops: None
) -> None:
    monkeypatch.setattr(fused, "COLUMNS", 32)
    given = draw(width)
    found, meant = fused.draw(*given), naive_draw_tokens(*given)
    assert torch.equal(found[:, 0], meant[:, 0])
    assert float((found[:, 1] - meant[:, 1]).abs().max()) < 1e-13


def test_logits_may_lie_apart_and_be_none(loops: None) -> None:
    logits, heat, point = draw(64)
    padded = torch.cat((logits, logits), 1)
    turned = logits.T.contiguous().T
    for form in (fused.draw, naive_draw_tokens):
        whole = form(logits, heat, point)
        for given in (padded[:, :64], turned):
            assert not given.is_contiguous()
            assert torch.equal(form(given, heat, point), whole)
        pair = torch.stack((heat, point), 1)
        assert torch.equal(form(logits, pair[:, 0], pair[:, 1]), whole)
    assert fused.draw(logits[:0], heat[:0], point[:0]).shape == (0, 2)


def test_logits_that_are_not_finite_show_in_their_own_row(loops: None) -> None:
    logits, heat, point = draw(64)
    logits[2, 7], logits[3, 9] = torch.nan, torch.inf
    finite = fused.draw(logits, heat, point).isfinite().all(1)
    assert (~finite).nonzero().flatten().tolist() == [2, 3]


def test_probabilities_by_hand() -> None:
    """Of 1/4, 1/4, 1/2 a point of 0.3 lies in the second; at temperature 1/2 they are 1/6, 1/6,
    2/3."""
    logits = torch.tensor([[1.0, 1.0, 2.0]], dtype=torch.float64).log().repeat(3, 1)
    heat, point = torch.tensor([1.0, 0.5, 0.0]).double(), torch.tensor([0.3, 0.3, 0.3]).double()
    found = draw_tokens(logits.to(DEVICE), heat.to(DEVICE), point.to(DEVICE)).cpu()
    assert found[:, 0].tolist() == [1, 1, 2]
    assert found[:, 1].exp().tolist() == pytest.approx([1 / 4, 1 / 6, 1 / 2])


def test_points_are_those_of_the_host() -> None:
    keys = np.random.default_rng(0).integers(0, 1 << 64, 300, dtype=np.uint64)
    position = np.arange(300, dtype=np.int32) * 7_000_000
    found = fused.points(
        torch.from_numpy(keys.view(np.int64)).to(DEVICE), torch.from_numpy(position).to(DEVICE)
    )
    meant = naive_stream_points(torch.from_numpy(keys.view(np.int64)), torch.from_numpy(position))
    assert torch.equal(found.cpu(), meant)
    apart = [torch.from_numpy(x).to(DEVICE)[::3] for x in (keys.view(np.int64), position)]
    assert torch.equal(fused.points(*apart).cpu(), meant[::3])


def test_columns_that_do_not_fit_are_named() -> None:
    logits, heat = torch.zeros(3, 4), torch.ones(3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"temperature must be \[3\], got \[2\]"):
        draw_tokens(logits, heat[1:], heat)
    with pytest.raises(ValueError, match=r"point must be \[3\], got \[\]"):
        draw_tokens(logits, heat, heat[0])
    keys, numbers = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"position must be \[3\], got \[1\]"):
        stream_points(keys, numbers[:1])
    stops, drawn = torch.zeros(1, 4, dtype=torch.uint8), torch.zeros(3, 2, dtype=torch.float64)
    apart = torch.zeros(3, 2, dtype=torch.int32)[:, 0]
    for at, column in ((2, apart), (5, numbers[1:])):
        columns = [numbers.clone() for _ in range(6)]
        columns[at] = column
        with pytest.raises(ValueError, match=r"(past|stop) must be \[3\] without gaps, got"):
            advance_(drawn, stops, *columns)


@pytest.mark.parametrize("follow", [fused.advance, naive_advance])
def test_a_step_is_followed_by_hand(follow: Callable[..., None]) -> None:
    """Of five sequences the first goes on, the second draws a stop token of its set, the third one
    of the other set, the fourth has no token left, the fifth was over before."""
    stops = torch.zeros(2, 6, dtype=torch.uint8)
    stops[0, 4] = stops[1, 5] = 1
    drawn = torch.tensor([[3.0, 0], [5, 0], [5, 0], [2, 0], [1, 0]], dtype=torch.float64)
    ids, places, past, position, left, stop = (
        torch.tensor(x, dtype=torch.int32, device=DEVICE)
        for x in (
            *([0, 0, 0, 0, 0], [7, 6, 5, 4, -1], [10, 11, 12, 13, 14], [20, 21, 22, 23, 24]),
            *([9, 9, 9, 1, 0], [0, 1, 0, 0, 0]),
        )
    )
    follow(drawn.to(DEVICE), stops.to(DEVICE), ids, places, past, position, left, stop)
    assert places.tolist() == [7, -1, 5, -1, -1]
    assert ids.tolist() == [3, 5, 5, 2, 0]
    assert past.tolist() == [11, 12, 13, 14, 14] and position.tolist() == [21, 22, 23, 24, 24]
    assert left.tolist() == [8, 8, 8, 0, 0]
