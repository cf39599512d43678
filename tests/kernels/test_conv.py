"""The short convolution: in Triton's interpreter where there is no GPU, else compiled, and the twin
in torch that a CPU takes."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
import torch.nn.functional as F

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are decorated, below
import triton.experimental.gluon  # noqa: E402, F401  # in the same mode: launches look into it

from farhorizon.kernels.conv import fused, naive_short_conv, short_conv  # noqa: E402

os.environ.pop("TRITON_INTERPRET", None)

DEVICE = "cuda" if GPU else "cpu"
CHANNELS = 20
Pair = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def small(loops: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that a few tokens and channels fill several."""
    torch.manual_seed(0)
    for name in ("TOKENS", "BACK_TOKENS"):
        monkeypatch.setattr(fused, name, 8)
    for name in ("CHANNELS", "BACK_CHANNELS"):
        monkeypatch.setattr(fused, name, 16)


def by_definition(
    x: torch.Tensor, kernel: torch.Tensor, bounds: tuple[int, ...], tail: torch.Tensor | None
) -> Pair:
    """Sequence by sequence, with torch's own convolution."""
    history = kernel.shape[1] - 1
    outs, tails = [], []
    for n, (begin, end) in enumerate(itertools.pairwise(bounds)):
        before = x.new_zeros(history, x.shape[1]) if tail is None else tail[n]
        window = torch.cat([before, x[begin:end]])
        tails.append(window[len(window) - history :])
        if end > begin:
            out = F.conv1d(window.T[None], kernel[:, None], groups=x.shape[1])[0].T
            outs.append(F.silu(out))
    return torch.cat(outs), torch.stack(tails)


def draw(bounds: tuple[int, ...], width: int, tail: bool) -> list[torch.Tensor | None]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    before = normal(len(bounds) - 1, width - 1, CHANNELS) if tail else None
    return [normal(bounds[-1], CHANNELS), normal(CHANNELS, width), before]


def leaves(inputs: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if x is None else x.clone().requires_grad_() for x in inputs]


def narrow(inputs: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The inputs in fp32 where the kernels run."""
    return [None if x is None else x.float().to(DEVICE) for x in inputs]


def run(inputs: list[torch.Tensor | None], bounds: tuple[int, ...]) -> Pair:
    x, kernel, tail = inputs
    assert x is not None and kernel is not None
    return fused.short_conv_fused(x, kernel, bounds, tail)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float, name: str = "") -> None:
    error = float((a.detach().double().cpu() - b.detach()).norm())
    assert error <= tolerance * float(b.detach().norm()), name


BOUNDS = [
    (0, 1),
    (0, 2, 2, 3),
    (0, 8, 24),
    (0, 0, 1, 3, 6, 10, 15, 15),
    (0, 23, 24, 25, 27, 27, 60),
    (0, 9, 9, 17, 26, 27, 28, 29, 30, 31),
]


@pytest.mark.parametrize(
    ("width", "tail", "onward"),
    [(4, False, False), (4, True, False), (4, True, True), (1, True, True), (2, False, True)],
)
@pytest.mark.parametrize("bounds", BOUNDS)
def test_results_and_gradients_are_those_of_the_definition(
    bounds: tuple[int, ...], width: int, tail: bool, onward: bool
) -> None:
    """``onward``: the new tail has a gradient too, from the piece that continues."""
    inputs = draw(bounds, width, tail)
    wide, own, twin = leaves(inputs), leaves(narrow(inputs)), leaves(inputs)
    expected = by_definition(*wide[:2], bounds, wide[2])  # type: ignore[arg-type]
    weights = [torch.randn_like(t) for t in expected]
    used = slice(None) if onward else slice(1)
    torch.autograd.backward(expected[used], weights[used])
    found = run(own, bounds)
    torch.autograd.backward(found[used], [w.float().to(DEVICE) for w in weights[used]])
    again = naive_short_conv(*twin[:2], bounds, twin[2])  # type: ignore[arg-type]
    torch.autograd.backward(again[used], weights[used])
    for name, a, b, c in zip(("y", "new tail"), found, again, expected, strict=True):
        close(a, c, 3e-6, name)
        close(b, c, 1e-12, name)
    for name, a, b, c in zip(("x", "kernel", "tail"), own, twin, wide, strict=True):
        if c is not None and c.grad is not None:
            assert a is not None and a.grad is not None and b is not None and b.grad is not None
            close(a.grad, c.grad, 3e-6, name)
            close(b.grad, c.grad, 1e-12, name)


def test_a_tail_on_a_cpu_takes_the_twin() -> None:
    x, kernel, tail = narrow(draw((0, 5, 9), 4, True))
    assert x is not None and kernel is not None and tail is not None
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        given = x.cpu().to(dtype), kernel.cpu(), (0, 5, 9), tail.cpu()
        for a, b in zip(short_conv(*given), naive_short_conv(*given), strict=True):
            assert a.dtype == dtype and torch.equal(a, b)


def test_one_token_by_hand() -> None:
    """1 * 2 + 2 * 3 + 3 * 5 with silu; the tail moves on by one token."""
    tail = torch.tensor([[[2.0], [3.0]]])
    y, new = short_conv(torch.tensor([[5.0]]), torch.tensor([[1.0, 2.0, 3.0]]), (0, 1), tail)
    torch.testing.assert_close(y, F.silu(torch.tensor([[23.0]])))
    assert new.flatten().tolist() == [3.0, 5.0]


def test_a_sequence_has_the_same_bits_alone_and_in_any_pack() -> None:
    inputs = narrow(draw((0, 3, 22, 22, 40), 4, True))
    x, kernel, tail = inputs
    assert x is not None and kernel is not None and tail is not None
    weight = torch.randn_like(x)

    def both(begin: int, end: int, bounds: tuple[int, ...], rows: slice) -> list[torch.Tensor]:
        own, before = x[begin:end].clone().requires_grad_(), tail[rows].clone().requires_grad_()
        y, new = run([own, kernel, before], bounds)
        grads = torch.autograd.grad(y, [own, before], weight[begin:end])
        a = 3 - begin
        n = 1 - rows.start
        return [y[a : a + 19], new[n], grads[0][a : a + 19], grads[1][n]]

    alone = both(3, 22, (0, 19), slice(1, 2))
    for other in (
        both(0, 40, (0, 3, 22, 22, 40), slice(0, 4)),
        both(0, 22, (0, 3, 22), slice(0, 2)),
        both(3, 40, (0, 19, 37), slice(1, 3)),
    ):
        assert all(torch.equal(a, b) for a, b in zip(alone, other, strict=True))


def test_pieces_with_carried_tails_are_one_pass() -> None:
    """Gradients too, through the tails of pieces shorter than the window."""
    bounds = (0, 13, 30)
    x, kernel, tail = narrow(draw(bounds, 4, True))
    assert x is not None and kernel is not None and tail is not None
    weight = torch.randn_like(x)
    whole, parts = leaves([x, kernel, tail]), leaves([x, kernel, tail])
    y, last = run(whole, bounds)
    wide, carried = parts[0], parts[2]
    assert wide is not None
    ys = []
    cuts = [(0, 1, 13, 15), (1, 2, 15, 16), (2, 2, 16, 18), (2, 11, 18, 19), (11, 13, 19, 30)]
    for a, b, c, d in cuts:
        piece = torch.cat([wide[a:b], wide[c:d]])
        out, carried = run([piece, parts[1], carried], (0, b - a, b - a + d - c))
        ys.append(out)
    order = torch.cat([torch.tensor([*range(a, b), *range(c, d)]) for a, b, c, d in cuts])
    order = order.to(DEVICE)
    joined = torch.cat(ys)
    assert torch.equal(joined, y[order]) and carried is not None and torch.equal(carried, last)
    y.backward(weight)
    joined.backward(weight[order])
    for a, b in zip(parts, whole, strict=True):
        assert a is not None and b is not None and a.grad is not None and b.grad is not None
        close(a.grad, b.grad.double().cpu(), 1e-6)


def test_a_neighbour_full_of_nan_does_not_leak() -> None:
    bounds = (0, 10, 12, 30)
    x, kernel, tail = narrow(draw(bounds, 4, True))
    assert x is not None and kernel is not None and tail is not None
    x[10:12], tail[1] = float("nan"), float("nan")
    weight = torch.randn_like(x)
    weight[10:12] = float("nan")
    own, before = x.clone().requires_grad_(), tail.clone().requires_grad_()
    y, new = run([own, kernel, before], bounds)
    grads = torch.autograd.grad([y, new], [own, before], [weight, torch.randn_like(new)])
    assert bool(y[10:12].isnan().all())
    for found in (y, grads[0]):
        assert not bool(found[:10].isnan().any()) and not bool(found[12:].isnan().any())
    for found in (new, grads[1]):
        assert not bool(found[::2].isnan().any())


def test_an_empty_sequence_passes_its_tail_on() -> None:
    x, kernel, tail = narrow(draw((0, 0, 4), 4, True))
    assert tail is not None
    tail[0, 1] = float("nan")
    before = tail.clone().requires_grad_()
    _, new = run([x, kernel, before], (0, 0, 4))
    assert torch.equal(new[0, ::2], tail[0, ::2]) and bool(new[0, 1].isnan().all())
    weight = torch.randn_like(new)
    (grad,) = torch.autograd.grad(new, before, weight)
    assert torch.equal(grad[0], weight[0])


def test_strided_rows_and_expanded_gradients() -> None:
    x, kernel, _ = narrow(draw((0, 20), 4, False))
    assert x is not None and kernel is not None
    wider = torch.cat([x, x + 1], 1)
    results = []
    for given in (x, wider[:, :CHANNELS]):
        own = given.detach().requires_grad_()
        y, _ = run([own, kernel, None], (0, 20))
        (grad,) = torch.autograd.grad(y.sum(), own)
        results.append([y, grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("kernel", "bounds", "tail", "text"),
    [
        (
            (3, 4),
            (0, 5),
            None,
            r"kernel must be \[C, W\] with W above 0 for x \[T, C\], got \[3, 4\] for \[5, 2\]",
        ),
        ((2, 0), (0, 5), None, "with W above 0"),
        ((2, 4), (0, 4), None, r"bounds must rise from 0 to the 5 tokens, got \[0, 4\]"),
        ((2, 4), (0, 5), (1, 4, 2), r"tail must be \[1, 3, 2\], got \[1, 4, 2\]"),
    ],
)
def test_shapes_that_do_not_fit_are_named(
    kernel: tuple[int, ...], bounds: tuple[int, ...], tail: tuple[int, ...] | None, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        given = None if tail is None else torch.zeros(tail)
        short_conv(torch.zeros(5, 2), torch.zeros(kernel), bounds, given)


def test_bounds_that_fall_are_refused() -> None:
    x, kernel, _ = narrow(draw((0, 9), 4, False))
    with pytest.raises(ValueError, match="bounds must not fall"):
        run([x, kernel, None], (0, 6, 4, 9))


def test_programs_share_the_tokens_of_a_pack_of_short_sequences() -> None:
    """24 sequences of one token and one of 20, in tiles of 8: a program for 8 tokens or so."""
    table = fused.tiles_of((*range(25), 44), 8, torch.device("cpu"))
    assert table.programs.tolist() == [0, 8, 16, 24, 25, 26, 27]
    assert table.tiles[-3:].tolist() == [[24, 8, 0, 20, 24], [32, 8, 8, 12, 24], [40, 4, 16, 4, 24]]
