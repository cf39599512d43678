"""The decode step of a whole KDA layer on the GPU, through the public function."""

from __future__ import annotations

import pytest
import torch

from farhorizon.kernels.conv import short_conv
from farhorizon.kernels.kda import decode_kda, recurrent_kda
from farhorizon.kernels.norm import gated_norm

pytestmark = pytest.mark.gpu

ROWS = ("qkv", "tail", "z", "beta", "gate")
EPS = 1e-5
Inputs = dict[str, torch.Tensor]
Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def draw(count: int, heads: int, width: int = 128, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    channels = 3 * heads * width
    shapes = {
        "qkv": (count, channels),
        "tail": (count, 3, channels),
        "z": (count, heads * width),
        "beta": (count, heads),
        "gate": (count, heads * width),
    }
    found = {name: torch.randn(shape, device="cuda").to(dtype) for name, shape in shapes.items()}
    found["kernel"] = torch.randn(channels, 4, device="cuda") / 2
    found["weight"] = 1 + torch.randn(width, device="cuda") / 4
    found["A_log"] = torch.randn(heads, device="cuda") * 0.3
    found["dt_bias"] = torch.randn(heads * width, device="cuda")
    return found


def state_of(count: int, heads: int, width: int = 128) -> torch.Tensor:
    return torch.randn(count, heads, width, width, device="cuda") * 0.3


def step(inputs: Inputs, state: torch.Tensor) -> Result:
    return decode_kda(**inputs, eps=EPS, initial_state=state)  # type: ignore[arg-type]


def by_parts(inputs: Inputs, state: torch.Tensor) -> Result:
    """The kernels of the three functions, one after another."""
    count, heads, width, _ = state.shape
    mixed, tail = short_conv(
        inputs["qkv"], inputs["kernel"], tuple(range(count + 1)), inputs["tail"]
    )
    q, k, v = mixed.view(count, 1, 3, heads, width).unbind(2)
    out, after = recurrent_kda(
        q,
        k,
        v,
        inputs["z"].view(count, 1, heads, width),
        inputs["beta"].view(count, 1, heads),
        A_log=inputs["A_log"],
        dt_bias=inputs["dt_bias"],
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    )
    assert after is not None
    gate = inputs["gate"].view(count, heads, width)
    return gated_norm(out[:, 0], gate, inputs["weight"], EPS).flatten(1), after, tail


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [16, 32, 64, 128])
def test_errors_are_those_of_rounding(width: int, dtype: torch.dtype) -> None:
    inputs, state = draw(5, 6, width, dtype), state_of(5, 6, width)
    out, after, tail = step(inputs, state)
    wide = {name: x.double() for name, x in inputs.items()}
    expected, last, _ = step(wide, state.double())
    assert out.dtype == tail.dtype == dtype and after.dtype == torch.float32
    at_out, at_state = {
        torch.bfloat16: (6e-3, 4e-3),
        torch.float16: (8e-4, 5e-4),
        torch.float32: (2e-6, 1e-6),
    }[dtype]
    assert relative(out, expected) < at_out and relative(after, last) < at_state
    whole = torch.cat([inputs["tail"], inputs["qkv"][:, None]], 1)
    assert torch.equal(tail, whole[:, 1:])


@pytest.mark.parametrize("width", [32, 128])
def test_it_differs_from_its_parts_by_fp32_sums(width: int) -> None:
    inputs, state = draw(17, 32, width), state_of(17, 32, width)
    found, expected = step(inputs, state), by_parts(inputs, state)
    assert float((found[0] != expected[0]).double().mean()) < 5e-3
    assert relative(found[0], expected[0]) < 5e-4
    assert relative(found[1], expected[1]) < 1e-6
    assert torch.equal(found[2], expected[2])


def test_a_call_that_wants_gradients_has_them() -> None:
    inputs, state = draw(2, 3), state_of(2, 3)
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    start = state.clone().requires_grad_()
    found = step(leaves, start)
    torch.autograd.backward(found, [torch.ones_like(x) for x in found])
    assert all(x.grad is not None for x in (start, *leaves.values()))
    with torch.inference_mode():
        again = step(leaves, start)
    for a, b, near in zip(again, found, (2.5e-3, 1e-6, 1e-9), strict=True):
        assert relative(a, b) < near


def test_repeats_have_the_same_bits() -> None:
    inputs, state = draw(64, 32), state_of(64, 32)
    expected = step(inputs, state)
    for _ in range(200):
        for a, b in zip(step(inputs, state), expected, strict=True):
            assert torch.equal(a, b)


def test_a_sequence_has_the_same_bits_alone_and_beside_others() -> None:
    inputs, state = draw(9, 12), state_of(9, 12)
    found = step(inputs, state)
    for n in (0, 4, 8):
        one = {name: x[n : n + 1] if name in ROWS else x for name, x in inputs.items()}
        for a, b in zip(step(one, state[n : n + 1]), found, strict=True):
            assert torch.equal(a, b[n : n + 1])


def test_more_than_2_31_elements_of_state() -> None:
    count, heads = 1025, 128
    inputs = draw(count, heads)
    state = torch.full((count, heads, 128, 128), 0.01, device="cuda")
    state[-1] = state_of(1, heads)[0]
    assert state.numel() > 2**31
    found = step(inputs, state)
    one = {name: x[-1:].clone() if name in ROWS else x for name, x in inputs.items()}
    for a, b in zip(step(one, state[-1:].clone()), found, strict=True):
        assert torch.equal(a, b[-1:])


def test_a_graph_replays_it() -> None:
    inputs, state = draw(4, 8), state_of(4, 8)
    expected = step(inputs, state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(inputs, state)
    for x in found:
        x.zero_()
    graph.replay()
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
