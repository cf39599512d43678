"""The decode kernel of KDA on the GPU, through the public function."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farhorizon.kernels.kda import chunk_kda, naive_kda, recurrent_kda

pytestmark = pytest.mark.gpu

FLAGS: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "output_final_state": True,
}
ROWS = ("q", "k", "v", "g", "beta")
Inputs = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def draw(count: int, heads: int, tokens: int = 1, *, width: int = 128) -> Inputs:
    shape = (count, tokens, heads, width)
    found = {name: torch.randn(shape, device="cuda").bfloat16() for name in ("q", "k", "v", "g")}
    found["beta"] = torch.randn(shape[:3], device="cuda").bfloat16()
    found["A_log"] = torch.randn(heads, device="cuda") * 0.3
    found["dt_bias"] = torch.randn(heads * width, device="cuda")
    return found


def state_of(count: int, heads: int, width: int = 128) -> torch.Tensor:
    return torch.randn(count, heads, width, width, device="cuda") * 0.3


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())


def walk(inputs: Inputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    outs = []
    for t in range(inputs["q"].shape[1]):
        now = {n: x[:, t : t + 1] if n in ROWS else x for n, x in inputs.items()}
        out, after = recurrent_kda(**now, **FLAGS, initial_state=state)
        assert after is not None
        outs.append(out)
        state = after
    return torch.cat(outs, 1), state


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [16, 32, 64, 128])
def test_tokens_follow_the_recurrence(width: int, dtype: torch.dtype) -> None:
    inputs, state = draw(3, 4, 40, width=width), state_of(3, 4, width)
    given = {name: x.to(dtype) if name in ROWS else x for name, x in inputs.items()}
    wide = {name: x.double() for name, x in given.items()}
    expected, last = naive_kda(**wide, **FLAGS, initial_state=state.double())
    assert last is not None
    out, after = walk(given, state)
    assert out.dtype == dtype and after.dtype == torch.float32
    assert relative(out, expected) < {2: 2.5e-3, 4: 1e-6}[out.element_size()]
    assert relative(after, last) < 1e-6


def test_decode_goes_on_where_a_prefill_ended() -> None:
    inputs, state = draw(2, 4, 70), state_of(2, 4)
    expected, last = chunk_kda(**inputs, **FLAGS, initial_state=state)
    first = {name: x[:, :60] if name in ROWS else x for name, x in inputs.items()}
    rest = {name: x[:, 60:] if name in ROWS else x for name, x in inputs.items()}
    _, middle = chunk_kda(**first, **FLAGS, initial_state=state)
    assert middle is not None and last is not None
    out, after = walk(rest, middle)
    assert relative(out, expected[:, 60:]) < 6e-3
    assert relative(after, last) < 6e-3


def test_a_call_that_wants_gradients_has_them() -> None:
    inputs, state = draw(2, 3), state_of(2, 3)
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    start = state.clone().requires_grad_()
    out, after = recurrent_kda(**leaves, **FLAGS, initial_state=start)
    assert after is not None
    (out.float().sum() + after.sum()).backward()
    assert all(x.grad is not None for x in (start, *leaves.values()))
    with torch.no_grad():
        again, last = recurrent_kda(**leaves, **FLAGS, initial_state=start)
    assert last is not None
    assert relative(again, out) < 2.5e-3 and relative(last, after) < 1e-6


def test_repeats_have_the_same_bits() -> None:
    inputs, state = draw(64, 32), state_of(64, 32)
    expected = recurrent_kda(**inputs, **FLAGS, initial_state=state)
    for _ in range(200):
        again = recurrent_kda(**inputs, **FLAGS, initial_state=state)
        for a, b in zip(again, expected, strict=True):
            assert a is not None and b is not None and torch.equal(a, b)


def test_a_sequence_has_the_same_bits_alone_and_beside_others() -> None:
    inputs, state = draw(9, 12), state_of(9, 12)
    out, last = recurrent_kda(**inputs, **FLAGS, initial_state=state)
    assert last is not None
    for n in (0, 4, 8):
        one = {name: x[n : n + 1] if name in ROWS else x for name, x in inputs.items()}
        own, after = recurrent_kda(**one, **FLAGS, initial_state=state[n : n + 1])
        assert after is not None
        assert torch.equal(own, out[n : n + 1]) and torch.equal(after, last[n : n + 1])


def test_more_than_2_31_elements_of_state() -> None:
    count, heads = 1025, 128
    inputs = draw(count, heads)
    state = torch.full((count, heads, 128, 128), 0.01, device="cuda")
    state[-1] = state_of(1, heads)[0]
    assert state.numel() > 2**31
    out, last = recurrent_kda(**inputs, **FLAGS, initial_state=state)
    one = {name: x[-1:].clone() if name in ROWS else x for name, x in inputs.items()}
    own, after = recurrent_kda(**one, **FLAGS, initial_state=state[-1:].clone())
    assert last is not None and after is not None
    assert torch.equal(out[-1:], own) and torch.equal(last[-1:], after)


def test_a_graph_replays_it() -> None:
    inputs, state = draw(4, 8), state_of(4, 8)
    expected, last = recurrent_kda(**inputs, **FLAGS, initial_state=state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, after = recurrent_kda(**inputs, **FLAGS, initial_state=state)
    graph.replay()
    assert after is not None and last is not None
    assert torch.equal(out, expected) and torch.equal(after, last)
