"""Token log-probs: hand values, temperature, row blocks and gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from farhorizon.kernels.logprob import BLOCK_ELEMENTS, naive_token_logprobs, token_logprobs


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, -0.407606), (0.5, -0.142932)])
def test_temperature_divides_the_logits(temperature, expected):
    """C05: the side of the learner."""
    hidden, head = torch.eye(3)[:1], torch.tensor([[2.0, 0, 0], [1, 0, 0], [0, 0, 0]])
    value, entropy = token_logprobs(hidden, head, torch.tensor([0]), temperature)
    assert float(value) == pytest.approx(expected, abs=1e-6)
    p = torch.softmax(torch.tensor([2.0, 1, 0]) / temperature, 0)
    assert float(entropy) == pytest.approx(float(-(p * p.log()).sum()), abs=1e-6)


def test_row_blocks_change_nothing():
    torch.manual_seed(0)
    hidden = torch.randn(40, 5, dtype=torch.float64, requires_grad=True)
    head = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, (40,))
    results = []
    for form in (naive_token_logprobs, partial(token_logprobs, block_elements=7 * 11)):
        value, entropy = form(hidden, head, targets, 0.7)
        loss = (value * torch.linspace(0, 1, 40, dtype=value.dtype)).sum() + 0.3 * entropy.sum()
        results.append([value, entropy, *torch.autograd.grad(loss, [hidden, head])])
    for got, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, expected)


class Live(TorchDispatchMode):
    """The most bytes that tensors made inside take at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.bytes += size
            self.most = max(self.most, self.bytes)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.bytes -= size


def test_blocks_of_logits_do_not_live_on():
    """C26: forward and backward hold less than four tensors of a block beside what has the size of
    inputs, of twice as many tokens too; all logits at once take more. One block of the default size
    holds seven, which are less than 4 times 512 rows of 163,840 words in fp32, 1.25 GiB."""
    vocab, width, rows = 4096, 4, 16
    block = 4 * rows * vocab

    def most(tokens: int, form: Callable[..., Any]) -> int:
        torch.manual_seed(0)
        inputs = torch.randn(tokens, width), torch.randn(vocab, width)
        leaves = [part.requires_grad_() for part in inputs]
        with Live() as live:
            value, entropy = form(*leaves, torch.zeros(tokens, dtype=torch.long))
            torch.autograd.grad(value.sum() + entropy.sum(), leaves)
        return live.most

    in_blocks = partial(token_logprobs, block_elements=rows * vocab)
    first, second = (most(tokens, in_blocks) for tokens in (512, 1024))
    assert block < first < 4 * block and second < 1.05 * first
    assert 7 * 4 * BLOCK_ELEMENTS < 4 * 512 * 163_840 * 4
    assert most(512, naive_token_logprobs) > 2 * 512 // rows * block


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "dtypes", [("float32", "float32"), ("bfloat16",) * 2, ("bfloat16", "float32")]
)
def test_blocks_of_other_types_give_what_all_logits_give(dtypes: tuple[str, str], autocast: bool):
    torch.manual_seed(0)
    kinds = [getattr(torch, name) for name in dtypes]
    inputs = zip((60, 40), kinds, strict=True)
    leaves = [torch.randn(n, 16).to(kind).requires_grad_() for n, kind in inputs]
    targets, results = torch.randint(0, 40, (60,)), []
    for elements in (None, 7 * 40):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            hidden, head = leaves
            outs = token_logprobs(hidden, head, targets, 0.7, block_elements=elements)
        grads = torch.autograd.grad(outs[0].sum() + 0.3 * outs[1].sum(), leaves)
        results.append([*outs, *grads])
    assert [x.dtype for x in results[0]] == [x.dtype for x in results[1]]
    narrow = autocast or "bfloat16" in dtypes
    for got, expected in zip(*results, strict=True):
        off = (got - expected).detach().double().norm() / expected.detach().double().norm()
        assert float(off) < (2e-2 if narrow else 1e-6)


def test_only_one_of_both_in_blocks():
    """A gradient of the log-probs alone or the entropies alone, and of one input alone."""
    torch.manual_seed(0)
    inputs = torch.randn(9, 5, dtype=torch.float64), torch.randn(11, 5, dtype=torch.float64)
    targets = torch.randint(0, 11, (9,))
    for which in (0, 1):
        for wanted in (0, 1):
            results = []
            for elements in (None, 2 * 11):
                leaves = [x.clone().requires_grad_(i == wanted) for i, x in enumerate(inputs)]
                hidden, head = leaves
                out = token_logprobs(hidden, head, targets, block_elements=elements)[which]
                results.append(torch.autograd.grad(out.square().sum(), leaves[wanted])[0])
            torch.testing.assert_close(*results)


def test_temperature_zero_is_refused():
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([0]), 0.0)


def test_no_rows_and_strided_ones():
    """A micro-batch without trained tokens, and rows and words that lie apart."""
    torch.manual_seed(0)
    hidden, head = torch.randn(6, 5, requires_grad=True), torch.randn(11, 5, requires_grad=True)
    value, entropy = token_logprobs(hidden[:0], head, torch.zeros(0, dtype=torch.long))
    assert value.shape == entropy.shape == (0,)
    grads = torch.autograd.grad(value.sum() + entropy.sum(), [hidden, head])
    assert not any(bool(grad.any()) for grad in grads)
    targets = torch.randint(0, 11, (6, 2))[:, 1]
    results = []
    for given in ((hidden, head), (torch.stack([hidden, head[:6]], 2)[..., 0], head.T.clone().T)):
        outs = token_logprobs(*given, targets, 0.7, block_elements=2 * 11)
        results.append([*outs, *torch.autograd.grad(outs[0].sum() + outs[1].sum(), [hidden, head])])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)
