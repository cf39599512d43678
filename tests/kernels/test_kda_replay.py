"""Replayed decoding has the bits of one pass: in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are decorated, below

from farhorizon.kernels.kda import (  # noqa: E402
    ReplayState,
    chunk_kda,
    fused,
    replay,
    replay_chunks,  # noqa: F401 - decorates its kernels
    replay_kda,
    segments,
)
from farhorizon.kernels.kda.tables import Options  # noqa: E402

os.environ.pop("TRITON_INTERPRET", None)

WIDTH = 64 if GPU else 16
DEVICE = "cuda" if GPU else "cpu"
NAMES = ("q", "k", "v", "g", "beta")
FLAGS: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}
Inputs = dict[str, torch.Tensor]


@pytest.fixture
def kernels(loops: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels run on fp32."""
    monkeypatch.setattr(replay, "takes_kernels", lambda x: x.dtype != torch.float64)


def draw(tokens: int, heads: int = 2, seed: int = 0) -> Inputs:
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen).to(DEVICE)

    found = {name: normal(1, tokens, heads, WIDTH) for name in ("q", "k", "v", "g")}
    found["g"] -= 3.0
    rest = {"A_log": normal(heads) * 0.3, "dt_bias": normal(heads * WIDTH)}
    return {**found, "beta": normal(1, tokens, heads), **rest}


def states(count: int, heads: int = 2) -> torch.Tensor:
    gen = torch.Generator().manual_seed(9)
    return (torch.randn(count, heads, WIDTH, WIDTH, generator=gen) * 0.3).to(DEVICE)


def whole(inputs: Inputs, initial: torch.Tensor, bound: float = -5.0) -> torch.Tensor:
    """One pass over the only sequence, in kernels."""
    q, k, v, g, beta = (inputs[name][0] for name in NAMES)
    a_log, dt_bias = inputs["A_log"], inputs["dt_bias"]
    options = Options((0, len(q)), WIDTH**-0.5, bound, True, True, True)
    return fused.chunk_kda_fused(q, k, v, g, beta, a_log, dt_bias, initial, False, options)[0]


def part(inputs: Inputs, start: int, end: int) -> Inputs:
    return {n: (x[:, start:end] if n in NAMES else x) for n, x in inputs.items()}


def packed(parts: list[Inputs]) -> tuple[Inputs, torch.Tensor]:
    """Pieces of several sequences in one row, and their bounds."""
    found = {n: torch.cat([p[n] for p in parts], 1) for n in NAMES}
    lengths = torch.tensor([0, *(p["q"].shape[1] for p in parts)])
    return {**parts[0], **found}, lengths.cumsum(0)


def stepped(parts: list[Inputs]) -> Inputs:
    """One token of each of several sequences, as a batch."""
    return {**parts[0], **{n: torch.cat([p[n] for p in parts]) for n in NAMES}}


def walk(
    inputs: list[Inputs], initial: torch.Tensor, schedule: list[tuple[int, ...]], bound: float
) -> ReplayState:
    """Feed so many tokens of each sequence in turn; every output must have the bits of one pass."""
    ends = [sum(column) for column in zip(*schedule, strict=True)]
    expected = [
        whole(part(x, 0, end), initial[n : n + 1], bound)
        for n, (x, end) in enumerate(zip(inputs, ends, strict=True))
    ]
    state = ReplayState.start(initial, lower_bound=bound)
    done = [0] * len(inputs)
    for counts in schedule:
        ends = [a + n for a, n in zip(done, counts, strict=True)]
        parts = [part(x, a, b) for x, a, b in zip(inputs, done, ends, strict=True)]
        if set(counts) == {1}:
            out = replay_kda(**stepped(parts), state=state, lower_bound=bound, **FLAGS)
            found = list(out)
        else:
            row, bounds = packed(parts)
            rest = {"cu_seqlens": bounds, "lower_bound": bound, **FLAGS}
            found = list(replay_kda(**row, state=state, **rest)[0].split(list(counts)))
        for n, (a, b) in enumerate(zip(done, ends, strict=True)):
            assert torch.equal(found[n], expected[n][a:b]), (counts, n, a)
        done = ends
    assert state.lengths.tolist() == done
    return state


@pytest.mark.parametrize("bound", [-5.0, -5.8])
def test_steps_and_pieces_have_the_bits_of_one_pass(kernels: None, bound: float) -> None:
    """Over a boundary in steps and in a piece; chunks have 32 and 16 tokens."""
    size = 32 if bound == -5.0 else 16
    ones = [(1,)] * 3
    schedule = [*ones, (size - 4,), *ones, (size + 2,), *ones]
    walk([draw(2 * size + 8, 1)], states(1, 1), schedule, bound)


def test_no_bit_changes_beyond_a_cut(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences pass cuts in steps, at the end of a piece and inside one, and never at once."""
    monkeypatch.setattr(segments, "SPLIT_TOKENS", 64)
    inputs = [draw(150, 1, seed) for seed in range(2)]
    inputs[1] |= {n: inputs[0][n] for n in ("A_log", "dt_bias")}
    ones = [(1, 1)] * 3
    schedule = [(33, 0), (30, 31), *ones, (62, 0), *ones, (0, 103), *ones]
    state = walk(inputs, states(2, 1), schedule, -5.0)
    assert state.stretch is not None
    assert torch.equal(state.stretch[2][0], torch.zeros_like(state.stretch[2][0]))  # began at 128


def test_so_many_heads_are_never_cut(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SPLIT_TOKENS", 64)
    monkeypatch.setattr(segments, "MOST_HEADS", 1)
    inputs = [draw(67, 2, seed) for seed in range(2)]
    inputs[1] |= {n: inputs[0][n] for n in ("A_log", "dt_bias")}
    state = walk(inputs, states(2), [(63, 1), (1, 1), (3, 31)], -5.0)
    assert state.stretch is None


def test_rows_fork_replace_and_join(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each continuation of a prompt has the bits of a pass over the prompt and it."""
    monkeypatch.setattr(segments, "SPLIT_TOKENS", 64)
    prompt, initial = draw(62, 1), states(1, 1)
    same = {n: prompt[n] for n in ("A_log", "dt_bias")}
    tails = [draw(4, 1, seed) | same for seed in (1, 2)]
    state = ReplayState.start(initial)
    replay_kda(**prompt, state=state, **FLAGS)
    forked = state.select(torch.tensor([0, 0], device=DEVICE))
    joined = ReplayState.cat([ReplayState.start(states(1, 1)), forked])
    joined.put(torch.tensor([0], device=DEVICE), state)
    expected = [whole(packed([prompt, tail])[0], initial)[62:] for tail in tails]
    for t in range(4):
        rows = [part(tails[n], t, t + 1) for n in (1, 0, 1)]
        out = replay_kda(**stepped(rows), state=joined, **FLAGS)
        for row, n in enumerate((1, 0, 1)):
            assert torch.equal(out[row, 0], expected[n][t]), (t, row)
    assert state.lengths.tolist() == [62] and joined.lengths.tolist() == [66] * 3


def test_what_is_left_in_buffers_does_not_leak(kernels: None) -> None:
    inputs, initial = draw(40), states(1)
    expected = whole(inputs, initial)
    state = ReplayState.start(initial)
    for x in state.rows:
        x.fill_(float("nan"))
    found = [replay_kda(**part(inputs, a, b), state=state, **FLAGS) for a, b in ((0, 5), (5, 40))]
    assert torch.equal(torch.cat(found, 1)[0], expected)


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_plain_torch_it_is_equal_up_to_rounding(dtype: torch.dtype, bound: float | None) -> None:
    inputs = {n: x.to("cpu", dtype) for n, x in draw(60).items()}
    initial = states(2).to("cpu", dtype)
    batch = {n: (x.view(2, 30, *x.shape[2:]) if n in NAMES else x) for n, x in inputs.items()}
    flags = {**FLAGS, "lower_bound": bound}
    expected, _ = chunk_kda(**batch, initial_state=initial, **flags)
    state = ReplayState.start(initial, dtype=dtype, lower_bound=bound)
    cuts = [0, 5, 6, 7, 25, *range(26, 31)]
    found = [
        replay_kda(**part(batch, a, b), state=state, **flags) for a, b in itertools.pairwise(cuts)
    ]
    limit = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=limit, rtol=limit)
    assert state.lengths.tolist() == [30, 30]
    empty = replay_kda(**part(batch, 0, 0), state=state, **flags)
    assert empty.shape == (2, 0, 2, WIDTH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(2, 1, 2, 8)}, r"k has shape \(2, 1, 2, 8\)"),
        (
            {"v": torch.zeros(2, 1, 2, 8)},
            r"v has shape \(2, 8\) a token, the state holds",
        ),
        ({"beta": torch.zeros(2, 1, 2).double()}, "beta has dtype torch.float64"),
        ({"A_log": torch.zeros(3)}, r"A_log has shape \(3,\)"),
        ({"state": ReplayState.start(torch.zeros(3, 2, 16, 16))}, "q has 2 sequences, .* holds 3"),
        ({"cu_seqlens": torch.tensor([0, 2])}, "cu_seqlens needs batch size 1"),
        ({"lower_bound": -6.0}, "lower_bound must lie"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    x = torch.zeros(2, 1, 2, 16)
    given = {"q": x, "k": x, "v": x, "g": x, "beta": x[..., 0], "A_log": torch.zeros(2)}
    rest = {"dt_bias": torch.zeros(32), "state": ReplayState.start(torch.zeros(2, 2, 16, 16))}
    with pytest.raises(ValueError, match=message):
        replay_kda(**(given | rest | change), **FLAGS)  # type: ignore[arg-type]


def test_a_state_for_another_device_or_bound_is_named(kernels: None) -> None:
    state = ReplayState.start(states(1), lower_bound=-5.8)
    with pytest.raises(ValueError, match="state has chunks of 16 tokens, these inputs need 32"):
        replay_kda(**draw(1), state=state, **FLAGS)
    with pytest.raises(ValueError, match="q has head size 48"):
        ReplayState.start(torch.zeros(1, 1, 48, 48))
