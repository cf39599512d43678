"""Token log-probs on the GPU in 16 bits, through the public function: accuracy, memory, bits."""

from __future__ import annotations

import pytest
import torch

from farhorizon.kernels.logprob import naive_token_logprobs, token_logprobs

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def draw(
    rows: int, columns: int, width: int, dtype: torch.dtype = BF16
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Hidden states and a head whose logits have a standard deviation of about 3, and targets."""
    hidden = torch.randn(rows, width, device="cuda").to(dtype)
    head = (torch.randn(columns, width, device="cuda") * 3 * width**-0.5).to(dtype)
    return [hidden, head], torch.randint(0, columns, (rows,), device="cuda")


def score(inputs: list[torch.Tensor], targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, head = inputs
    return token_logprobs(hidden, head, targets)


def both(
    inputs: list[torch.Tensor], targets: torch.Tensor, pulls: list[torch.Tensor], temperature: float
) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    outs = token_logprobs(leaves[0], leaves[1], targets, temperature)
    return [*(x.detach() for x in outs), *torch.autograd.grad(outs, leaves, pulls)]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())


@pytest.mark.parametrize("head_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "columns", "width", "temperature"),
    [(1, 7, 64, 1.0), (777, 1000, 128, 0.7), (300, 32_768, 256, 1.0), (130, 50_257, 96, 1.3)],
)
def test_errors_are_those_of_rounding(
    rows: int,
    columns: int,
    width: int,
    temperature: float,
    dtype: torch.dtype,
    head_dtype: torch.dtype | None,
) -> None:
    """Logits are not rounded at all; gradients by their own and that of d logits."""
    inputs, targets = draw(rows, columns, width, dtype)
    inputs[1] = inputs[1].to(head_dtype or dtype)
    pulls = [torch.randn(rows, device="cuda") for _ in range(2)]
    found = both(inputs, targets, pulls, temperature)
    leaves = [x.double().requires_grad_() for x in inputs]
    outs = naive_token_logprobs(leaves[0], leaves[1], targets, temperature)
    expected = [*outs, *torch.autograd.grad(outs, leaves, [p.double() for p in pulls])]
    assert [x.dtype for x in found[2:]] == [dtype, head_dtype or dtype]
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert relative(a, b) < (3e-6 if index < 2 else 4e-3), index
    assert float((found[0].double() - expected[0]).abs().max()) < 3e-5


def test_autocast_of_a_wide_policy_takes_the_kernels() -> None:
    """fp32 hidden states and head: products in bf16, logits and gradients in fp32."""
    inputs, targets = draw(200, 5000, 128)
    wide = [x.float() for x in inputs]
    pulls = [torch.randn(200, device="cuda") for _ in range(2)]
    with torch.autocast("cuda", BF16):
        found = both(wide, targets, pulls, 1.0)
    narrow = both([inputs[0], wide[1]], targets, pulls, 1.0)
    assert [x.dtype for x in found] == [torch.float32] * 4
    assert all(torch.equal(found[i], narrow[i]) for i in (0, 1, 3))
    assert relative(found[2], narrow[2]) < 3e-3  # which is rounded


def test_a_row_has_the_same_bits_in_any_company() -> None:
    inputs, targets = draw(20_000, 32_768, 512)
    with torch.no_grad():
        whole = score(inputs, targets)
        for begin, count in ((0, 1), (19_999, 1), (5, 16), (77, 300), (1, 12_345)):
            mine = slice(begin, begin + count)
            part = token_logprobs(inputs[0][mine], inputs[1], targets[mine])
            assert all(torch.equal(a[mine], b) for a, b in zip(whole, part, strict=True)), count


def test_repeats_have_the_same_bits() -> None:
    inputs, targets = draw(5000, 32_768, 512)
    pulls = [torch.randn(5000, device="cuda") for _ in range(2)]
    first = both(inputs, targets, pulls, 0.9)
    for _ in range(20):
        assert all(
            torch.equal(a, b) for a, b in zip(first, both(inputs, targets, pulls, 0.9), strict=True)
        )


def test_logits_are_never_all_there() -> None:
    """2^31 logits and more: 8 GiB in fp32, of which less than 1 GiB exists at a time."""
    inputs, targets = draw(65_536, 40_000, 256)
    leaves = [x.requires_grad_() for x in inputs]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outs = token_logprobs(leaves[0], leaves[1], targets)
    grads = torch.autograd.grad(outs, leaves, [torch.ones_like(x) for x in outs])
    named = sum(x.numel() * x.element_size() for x in (*outs, *outs, *grads))
    named += 4 * inputs[1].numel()  # the sums of the head's gradient
    assert torch.cuda.max_memory_allocated() - before - named < 1 << 30
    last = slice(-300, None)
    part = [inputs[0][last].detach().double(), inputs[1].detach().double()]
    expected = naive_token_logprobs(part[0], part[1], targets[last])
    assert all(relative(a[last], b) < 3e-6 for a, b in zip(outs, expected, strict=True))


def peak_of(tokens: int, block_elements: int) -> int:
    """Bytes on top of inputs, outputs and gradients at a vocabulary of 163,840 and 64 columns."""
    inputs, targets = draw(tokens, 163_840, 64)
    leaves = [x.requires_grad_() for x in inputs]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outs = token_logprobs(leaves[0], leaves[1], targets, block_elements=block_elements)
    grads = torch.autograd.grad(outs, leaves, [torch.ones_like(x) for x in outs])
    named = sum(x.numel() * x.element_size() for x in (*outs, *outs, *grads))
    named += 4 * inputs[1].numel()  # the sums of the head's gradient
    return torch.cuda.max_memory_allocated() - before - named


def test_twice_the_tokens_take_no_more() -> None:
    """C26: blocks of 512 rows take less than 1.25 GiB, and 5 % more at most for twice the rows."""
    most = [peak_of(tokens, 512 * 163_840) for tokens in (4096, 8192)]
    assert most[0] < 1.25 * 2**30 and most[1] < 1.05 * most[0]


def test_nothing_waits_for_the_device() -> None:
    inputs, targets = draw(300, 1000, 64)
    pulls = [torch.randn(300, device="cuda") for _ in range(2)]
    both(inputs, targets, pulls, 1.0)  # compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        both(inputs, targets, pulls, 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_cuda_graph_gives_the_same_bits() -> None:
    inputs, targets = draw(300, 5000, 64)
    with torch.no_grad():
        expected = score(inputs, targets)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = score(inputs, targets)
        graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


def test_fp32_without_autocast_runs_in_torch() -> None:
    inputs, targets = draw(50, 700, 64, torch.float32)
    found, expected = score(inputs, targets), naive_token_logprobs(inputs[0], inputs[1], targets)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
