"""The kernels of token log-probs: in Triton's interpreter where there is no GPU, else compiled."""

from __future__ import annotations

import os

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are decorated, below
import triton.experimental.gluon  # noqa: E402, F401  # in the same mode: launches look into it

from farhorizon.kernels.logprob import fused, naive_token_logprobs  # noqa: E402

os.environ.pop("TRITON_INTERPRET", None)

DEVICE = "cuda" if GPU else "cpu"
FP32 = torch.float32
Pair = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def small(loops: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles and blocks so small that a few rows and columns fill several."""
    torch.manual_seed(0)
    for name, value in {"COLUMNS": 32, "UNIT": 16, "BLOCK": 8, "GRADIENT_BLOCK": 16}.items():
        monkeypatch.setattr(fused, name, value)


def draw(rows: int, columns: int, width: int = 5, scale: float = 1.0) -> list[torch.Tensor]:
    hidden = torch.randn(rows, width, dtype=torch.float64) * scale
    return [hidden, torch.randn(columns, width, dtype=torch.float64)]


def factors(rows: int) -> list[torch.Tensor]:
    return [torch.randn(rows, dtype=torch.float64) for _ in range(2)]


def apply(
    inputs: list[torch.Tensor],
    targets: torch.Tensor,
    temperature: float,
    *,
    dtype: torch.dtype = FP32,
    most: int | None = None,
) -> Pair:
    hidden, head = inputs
    return fused.token_logprobs_fused(hidden, head, targets, temperature, dtype, most)


def definition(
    inputs: list[torch.Tensor], targets: torch.Tensor, temperature: float, pulls: list[torch.Tensor]
) -> list[torch.Tensor]:
    leaves = [x.double().cpu().requires_grad_() for x in inputs]
    outs = naive_token_logprobs(leaves[0], leaves[1], targets, temperature)
    return [*outs, *torch.autograd.grad(outs, leaves, pulls)]


def kernels(
    inputs: list[torch.Tensor],
    targets: torch.Tensor,
    temperature: float,
    pulls: list[torch.Tensor],
    *,
    dtype: torch.dtype = FP32,
    most: int | None = None,
) -> list[torch.Tensor]:
    leaves = [x.to(DEVICE).detach().requires_grad_() for x in inputs]
    outs = apply(leaves, targets.to(DEVICE), temperature, dtype=dtype, most=most)
    grads = torch.autograd.grad(outs, leaves, [p.to(DEVICE, FP32) for p in pulls])
    return [x.detach().cpu() for x in (*outs, *grads)]


def close(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        wide = b.detach().double()
        error = float((a.double() - wide).norm())
        assert error <= tolerance * float(wide.norm()), (index, error)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 3.0])
@pytest.mark.parametrize(
    ("rows", "columns", "most"),
    [(1, 1, None), (7, 3, None), (5, 32, 2), (9, 70, 4), (6, 129, None), (4, 41, 1)],
)
def test_results_and_gradients_are_those_of_the_definition(
    rows: int, columns: int, most: int | None, temperature: float
) -> None:
    inputs, pulls = [x.float() for x in draw(rows, columns)], factors(rows)
    targets = torch.randint(0, columns, (rows,))
    expected = definition(inputs, targets, temperature, pulls)
    found = kernels(inputs, targets, temperature, pulls, most=most)
    if columns == 1:  # certain: all of it is exactly 0
        assert not any(bool(x.any()) for x in (*found, *expected))
    close(found, expected, 3e-6)


def test_two_words_by_hand() -> None:
    """Logits (0, ln 3) at temperature 1, or their doubles at 2: p = 1/4, 3/4."""
    head = torch.tensor([[0.0], [1.0986122886681098]])
    for hidden, temperature in ((1.0, 1.0), (2.0, 2.0)):
        inputs = [torch.full((2, 1), hidden), head]
        one = torch.ones(2)
        found = kernels(inputs, torch.tensor([0, 1]), temperature, [one, 0 * one])
        torch.testing.assert_close(found[0], torch.tensor([-1.3862944, -0.2876821]))
        torch.testing.assert_close(found[1], torch.full((2,), 0.5623351))
        # d log p_0 / d logits = (3/4, -3/4), d log p_1 = (-1/4, 1/4): together (1/2, -1/2) h / T
        torch.testing.assert_close(found[3], torch.tensor([[0.5], [-0.5]]) * hidden / temperature)


def test_large_logits_lose_nothing() -> None:
    """All logits near 1,000 or near -1,000: the differences decide."""
    hidden, head = (x.float() for x in draw(6, 40, 4))
    inputs = [torch.cat([hidden, torch.full((6, 1), 32.0)], 1), torch.empty(0)]
    for level in (31.25, -31.25):
        inputs[1] = torch.cat([head, torch.full((40, 1), level)], 1)
        inputs = [x.bfloat16().float() for x in inputs]
        targets, pulls = torch.randint(0, 40, (6,)), factors(6)
        found = kernels(inputs, targets, 0.5, pulls)
        close(found, definition(inputs, targets, 0.5, pulls), 3e-4)  # an ulp at 1,000 is 6e-5


def test_a_certain_word_keeps_its_small_gradients() -> None:
    """p = 1 - 5e-7: results to the last bit of 1, and the gradients that pull others up."""
    inputs = [torch.ones(1, 1), torch.tensor([[0.0], [-15.0], [-15.5]])]
    pulls = [torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)]
    found = kernels(inputs, torch.tensor([0]), 1.0, pulls)
    expected = definition(inputs, torch.tensor([0]), 1.0, pulls)
    assert all(abs(float(found[i] - expected[i].detach())) < 2e-7 for i in (0, 1))
    # Half an ulp of the exponent of two, 22.4, is 7e-7 of the result; exp2 itself adds to it.
    close([found[3][1:]], [expected[3][1:]], 2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_and_a_wide_head(dtype: torch.dtype) -> None:
    """Gradients have the dtype of what they belong to; only d logits is rounded on the way."""
    inputs, pulls = draw(9, 70), factors(9)
    inputs = [inputs[0].to(dtype), inputs[1].to(dtype).float()]
    targets = torch.randint(0, 70, (9,))
    found = kernels(inputs, targets, 0.8, pulls, dtype=dtype, most=6)
    expected = definition(inputs, targets, 0.8, pulls)
    assert [x.dtype for x in found] == [FP32, FP32, dtype, FP32]
    close(found[:2], expected[:2], 3e-6)
    close(found, expected, 8e-3)


def test_only_what_is_asked_for_is_computed() -> None:
    inputs, pulls = [x.float() for x in draw(9, 70)], factors(9)
    targets = torch.randint(0, 70, (9,))
    nothing = torch.zeros(9, dtype=torch.float64)
    for used in (0, 1):  # of the two outputs
        asked = [p if i == used else nothing for i, p in enumerate(pulls)]
        expected = definition(inputs, targets, 1.0, asked)
        for wanted in (0, 1):
            leaves = [x.to(DEVICE).requires_grad_(i == wanted) for i, x in enumerate(inputs)]
            outs = apply(leaves, targets.to(DEVICE), 1.0, most=9)
            (grad,) = torch.autograd.grad(outs[used], leaves[wanted], pulls[used].to(DEVICE, FP32))
            error = float((grad.double().cpu() - expected[2 + wanted]).norm())
            assert error < 3e-6 * float(expected[2 + wanted].norm())


def test_a_row_has_the_same_bits_in_any_company() -> None:
    # the products of eighths are exact, in whatever order a CPU sums them
    inputs, pulls = [(8 * x).round().float() / 8 for x in draw(30, 70)], factors(30)
    targets = torch.randint(0, 70, (30,))
    whole = kernels(inputs, targets, 1.0, pulls, most=9)
    for begin in (0, 7, 29):
        mine = slice(begin, begin + 1)
        part = [inputs[0][mine], inputs[1]]
        found = kernels(part, targets[mine], 1.0, [p[mine] for p in pulls], most=9)
        assert all(torch.equal(a[mine], b) for a, b in zip(whole[:2], found[:2], strict=True))


def test_a_target_outside_of_the_vocabulary_is_nan_and_stays_in_its_row() -> None:
    inputs, pulls = [x.float() for x in draw(6, 40)], factors(6)
    targets = torch.tensor([3, 40, 39, -100, 0, 7])
    found = kernels(inputs, targets, 1.0, pulls)
    assert found[0].isnan().nonzero().flatten().tolist() == [1, 3]
    assert found[2].isnan().any(1).nonzero().flatten().tolist() == [1, 3]
    assert not found[1].isnan().any() and bool(found[3].isnan().all())
    others = [i for i in range(6) if i not in (1, 3)]
    expected = definition(inputs, targets.clamp(0, 39), 1.0, pulls)
    close([found[1]], [expected[1]], 3e-6)  # does not ask for a target
    close([found[i][others] for i in (0, 2)], [expected[i][others] for i in (0, 2)], 3e-6)


def test_strided_inputs_and_expanded_gradients() -> None:
    inputs, targets = [x.float().to(DEVICE) for x in draw(8, 40)], torch.randint(0, 40, (8, 2))
    apart = [torch.stack([x, -x], 2)[..., 0] for x in inputs]
    turned = [x.T.contiguous().T for x in inputs]
    chosen = targets.to(DEVICE)[:, 1]
    results = []
    for given in (inputs, apart, turned):
        leaves = [x.detach().requires_grad_() for x in given]
        outs = apply(leaves, chosen, 1.0, most=3)
        results.append([*outs, *torch.autograd.grad(outs[0].sum() + outs[1].sum(), leaves)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b)


def test_no_rows() -> None:
    leaves = [x.float().to(DEVICE).requires_grad_() for x in draw(0, 40)]
    empty = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    outs = apply(leaves, empty, 1.0)
    torch.cat(outs).sum().backward()
    assert [len(out) for out in outs] == [0, 0]
    assert leaves[0].grad is not None and leaves[0].grad.shape == (0, 5)
    assert leaves[1].grad is not None and not bool(leaves[1].grad.any())


def test_tiles_hold_what_they_may() -> None:
    for rows, columns, most in ((40, 70, 6), (1, 1, 1), (9, 33, None), (5, 11, 1)):
        hidden, head = (x.float() for x in draw(rows, columns))
        down, across, buffer = fused.tiles(hidden, head, most)
        for ranges, total in ((down, rows), (across, columns)):
            covered = [i for part in ranges for i in range(total)[part]]
            assert covered == list(range(total))
        height, width = down[0].stop, across[0].stop
        assert height <= (most or rows) and width <= fused.COLUMNS
        assert buffer.shape[0] == height and width <= buffer.shape[1] < width + fused.UNIT


def test_a_wide_policy_has_fewer_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "ELEMENTS", 8 * (32 + 8))
    heads = torch.empty(64, 8), torch.empty(64, 48)
    heights = [fused.tiles(head.new_empty(40, head.shape[1]), head, None)[0] for head in heads]
    assert [height[0].stop for height in heights] == [8, 4]
