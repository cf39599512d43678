"""Replayed decoding on the GPU in 16 bits has the bits of `chunk_kda` over the whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farhorizon.kernels.kda import ReplayState, chunk_kda, replay_kda

pytestmark = pytest.mark.gpu

FLAGS: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}
NAMES = ("q", "k", "v", "g", "beta")
Inputs = dict[str, torch.Tensor]


def draw(
    count: int, tokens: int, heads: int, width: int, dtype: torch.dtype = torch.bfloat16
) -> Inputs:
    gen = torch.Generator("cuda").manual_seed(count)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, device="cuda")

    found = {name: normal(count, tokens, heads, width) for name in ("q", "k", "v", "g")}
    found["g"] -= 4.0
    found = {**found, "beta": normal(count, tokens, heads)}
    rest = {"A_log": normal(heads) * 0.3, "dt_bias": normal(heads * width)}
    return {n: x.to(dtype) for n, x in found.items()} | rest


def states(count: int, heads: int, width: int) -> torch.Tensor:
    gen = torch.Generator("cuda").manual_seed(9)
    return torch.randn(count, heads, width, width, generator=gen, device="cuda") * 0.3


def part(inputs: Inputs, start: int, end: int) -> Inputs:
    return {n: (x[:, start:end] if n in NAMES else x) for n, x in inputs.items()}


@pytest.mark.parametrize("heads", [4, 40])
@pytest.mark.parametrize(
    ("width", "dtype"), [(64, torch.bfloat16), (128, torch.bfloat16), (128, torch.float16)]
)
def test_a_prefill_and_steps_have_the_bits_of_one_pass(
    width: int, dtype: torch.dtype, heads: int
) -> None:
    inputs, initial = draw(3, 300, heads, width, dtype), states(3, heads, width)
    whole, _ = chunk_kda(**inputs, initial_state=initial, **FLAGS)
    state = ReplayState.start(initial, dtype=dtype)
    assert (state.stretch is None) == (heads == 40)
    first = replay_kda(**part(inputs, 0, 77), state=state, **FLAGS)
    assert torch.equal(first, whole[:, :77])
    for t in range(77, 300):
        out = replay_kda(**part(inputs, t, t + 1), state=state, **FLAGS)
        assert torch.equal(out[:, 0], whole[:, t]), t


def test_pieces_of_different_lengths_have_the_bits_of_one_pass() -> None:
    inputs, initial = draw(3, 400, 4, 128), states(3, 4, 128)
    whole, _ = chunk_kda(**inputs, initial_state=initial, **FLAGS)
    state, done = ReplayState.start(initial, dtype=torch.bfloat16), [0, 0, 0]
    for counts in ((77, 0, 1), (19, 31, 1), (1, 1, 1), (64, 200, 0), (3, 1, 397)):
        spans = [(n, a, a + c) for n, (a, c) in enumerate(zip(done, counts, strict=True))]
        row = {name: torch.cat([inputs[name][n, a:b] for n, a, b in spans])[None] for name in NAMES}
        bounds = torch.tensor([0, *counts]).cumsum(0)
        out = replay_kda(**inputs | row, state=state, cu_seqlens=bounds, **FLAGS)
        wanted = torch.cat([whole[n, a:b] for n, a, b in spans])
        assert torch.equal(out[0], wanted), counts
        done = [b for _, _, b in spans]
    assert state.lengths.tolist() == done


@pytest.mark.parametrize("heads", [4, 40])
def test_a_graph_of_one_step_decodes_many_tokens(heads: int) -> None:
    inputs = draw(2, 117, heads, 128)
    whole, _ = chunk_kda(**inputs, **FLAGS)
    state = ReplayState.start(torch.zeros(2, heads, 128, 128, device="cuda"), dtype=torch.bfloat16)
    replay_kda(**part(inputs, 0, 77), state=state, **FLAGS)
    given = {n: x.clone() for n, x in part(inputs, 77, 78).items()}
    replay_kda(**given, state=state.select(torch.arange(2, device="cuda")), **FLAGS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = replay_kda(**given, state=state, **FLAGS)
    for t in range(77, 117):
        for name in NAMES:
            given[name].copy_(inputs[name][:, t : t + 1])
        graph.replay()
        assert torch.equal(out[:, 0], whole[:, t]), t
    assert state.lengths.tolist() == [117, 117]


def test_no_step_waits_for_the_device() -> None:
    inputs = draw(2, 120, 4, 128)
    state = ReplayState.start(states(2, 4, 128), dtype=torch.bfloat16)
    for start, end in ((0, 1), (1, 60)):  # compiles, and makes tables for pieces of these sizes
        replay_kda(**part(inputs, start, end), state=state, **FLAGS)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for start, end in ((60, 61), (61, 120)):
            replay_kda(**part(inputs, start, end), state=state, **FLAGS)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_bit_changes_beyond_a_cut() -> None:
    """32,768 tokens into a sequence of few heads its state goes through a map; in steps and in a
    piece, of two sequences at once."""
    inputs, initial = draw(2, 32_900, 8, 128), states(2, 8, 128)
    whole, _ = chunk_kda(**inputs, initial_state=initial, **FLAGS)
    state = ReplayState.start(initial, dtype=torch.bfloat16)
    first = replay_kda(**part(inputs, 0, 32_760), state=state, **FLAGS)
    assert torch.equal(first, whole[:, :32_760])
    before = state.select(torch.tensor([0, 1], device="cuda"))
    for t in range(32_760, 32_784):
        out = replay_kda(**part(inputs, t, t + 1), state=state, **FLAGS)
        assert torch.equal(out[:, 0], whole[:, t]), t
    piece = replay_kda(**part(inputs, 32_760, 32_900), state=before, **FLAGS)
    assert torch.equal(piece, whole[:, 32_760:])
