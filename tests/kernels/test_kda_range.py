"""KDA in torch far from the usual: decays, gradients and dtypes of any size and kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from farhorizon.kernels.kda import (
    ReplayState,
    chunk_kda,
    kda_gate,
    naive_kda,
    recurrent_kda,
    replay_kda,
)
from farhorizon.kernels.kda.chunk import chunk_kda_torch

HEADS, SIZE = 2, 8
NORMED: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}
GATED: dict[str, Any] = NORMED | {"use_gate_in_kernel": True}
FORMS = (naive_kda, chunk_kda, recurrent_kda)
Form = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
Inputs = dict[str, torch.Tensor]


def draw(tokens: int = 40, batch: int = 1, shift: float = 0.0) -> Inputs:
    """fp64; `raw` of it takes the gate's parameters away."""
    gen = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    found = {name: normal(batch, tokens, HEADS, SIZE) for name in ("q", "k", "v", "g")}
    found |= {"beta": normal(batch, tokens, HEADS), "A_log": normal(HEADS) * 0.3}
    found |= {"dt_bias": normal(HEADS * SIZE)}
    return found | {"g": found["g"] + shift}


def raw(decay: torch.Tensor, inputs: Inputs) -> Inputs:
    """The inputs with log decays in place of the gate."""
    return {n: x for n, x in inputs.items() if n not in ("A_log", "dt_bias")} | {"g": decay}


def results(
    form: Form, inputs: Inputs, flags: dict[str, Any], dtype: torch.dtype, size: float = 1.0
) -> dict[str, torch.Tensor]:
    """Outputs, final state, and gradients for upstream ones of ``size``."""
    leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
    out, final = form(**leaves, **flags, output_final_state=True)
    assert final is not None
    weights = [torch.linspace(-size, size, x.numel(), dtype=dtype) for x in (out, final)]
    weights = [w.view_as(x) for w, x in zip(weights, (out, final), strict=True)]
    grads = torch.autograd.grad([out, final], list(leaves.values()), weights)
    return {"out": out, "final": final} | dict(zip(leaves, grads, strict=True))


def check(inputs: Inputs, flags: dict[str, Any], limit: float, size: float = 1.0) -> None:
    """The chunked form in fp32 beside the recurrence in fp64."""
    found = results(chunk_kda, inputs, flags, torch.float32, size)
    expected = results(naive_kda, inputs, flags, torch.float64, size)
    for name, x in expected.items():
        error = (found[name].double() - x).norm() / x.norm()
        assert float(error.detach()) < limit, name


@pytest.mark.parametrize(("size", "values"), [(1e-12, 1.0), (1e-7, 1.0), (1e6, 1e4), (1.0, 1e-20)])
def test_gradients_of_any_size_keep_their_precision(size: float, values: float) -> None:
    """Decays near the bound span e^80 in a chunk: products of both must not leave fp32."""
    inputs = draw(64, shift=6.0)
    check(inputs | {"v": inputs["v"] * values}, GATED, 1e-3, size)


def test_small_gradients_of_the_form_of_autograd_keep_their_precision() -> None:
    """That of a GPU in fp32; its tiles carry e^G and e^-G as well."""
    inputs = draw(64, shift=6.0)

    decay = kda_gate(inputs["g"], inputs["A_log"], inputs["dt_bias"])
    k = torch.nn.functional.normalize(inputs["k"], dim=-1)
    rows = [inputs["q"] * SIZE**-0.5, k, inputs["v"], decay, inputs["beta"].sigmoid()]
    weight = torch.randn(1, 64, HEADS, SIZE, dtype=torch.float64) * 1e-12
    leaves = [x.clone().requires_grad_() for x in rows]
    expected = torch.autograd.grad(naive_kda(*leaves, scale=1.0)[0], leaves, weight)
    q, k, v, g, beta = leaves = [x.float().requires_grad_() for x in rows]
    out, _ = chunk_kda_torch(q[0], k[0], v[0], g[0], beta[0], None, (0, 64), True)
    found = torch.autograd.grad(out[None], leaves, weight.float())
    for a, b in zip(found, expected, strict=True):
        assert float((a.double() - b).norm() / b.norm()) < 1e-4


@pytest.mark.parametrize("low", [-50.0, -1e3, -1e6, -math.inf])
def test_slow_decays_behind_a_fast_one_keep_their_precision(low: float) -> None:
    inputs = draw()
    decay = -0.1 * torch.rand_like(inputs["g"])
    decay[:, ::7] = low
    check(raw(decay, inputs), NORMED, 1e-6)


@pytest.mark.parametrize("decay", [-5.0, -20.0, -50.0])
def test_fast_decays_have_an_exact_gradient(decay: float) -> None:
    """Far below the terms that would have to cancel in it."""
    inputs = draw()
    check(raw(torch.full_like(inputs["g"], decay), inputs), NORMED, 1e-6)


def test_parameters_of_the_unbounded_gate_have_exact_gradients_where_it_is_closed() -> None:
    check(draw(shift=20.0), GATED | {"lower_bound": None}, 1e-5)


def test_a_growing_state_is_that_of_the_recurrence() -> None:
    inputs = draw()
    check(raw(0.1 * torch.randn_like(inputs["g"]), inputs), NORMED, 1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_gates_that_cannot_be_are_named_in_anomaly_mode(form: Form) -> None:
    inputs = draw(20)
    growing = -torch.ones_like(inputs["g"])
    growing[0, 3, 1, 2] = 0.25
    broken = inputs["g"].clone()
    broken[0, 19, 0, 7] = math.nan
    with torch.autograd.set_detect_anomaly(True):
        with pytest.raises(
            ValueError, match=r"g must be a log decay, at most 0; it goes up to 0.25"
        ):
            form(**raw(growing, inputs), **NORMED)
        with pytest.raises(ValueError, match="g holds NaN"):
            form(**(inputs | {"g": broken}), **GATED)
        form(**inputs, **GATED)
    form(**raw(growing, inputs), **NORMED)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("flags", [GATED, GATED | {"lower_bound": None}])
def test_autocast_rounds_nothing(form: Form, flags: dict[str, Any]) -> None:
    inputs = {name: x.float() for name, x in draw(20).items()}
    state = torch.randn(1, HEADS, SIZE, SIZE)
    found: list[torch.Tensor] = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out, _ = form(**inputs, **flags, initial_state=state)
        found.append(out)
    assert torch.equal(*found)


def test_autocast_rounds_nothing_that_is_replayed() -> None:
    inputs = {name: x.float() for name, x in draw(20).items()}
    found: list[torch.Tensor] = []
    for enabled in (False, True):
        state = ReplayState.start(torch.zeros(1, HEADS, SIZE, SIZE))
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(replay_kda(**inputs, **GATED, state=state))
    assert torch.equal(*found)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("wide", ["q", "v", "g", "beta"])
def test_one_input_in_fp64_makes_all_of_it_fp64(form: Form, gate: bool, wide: str) -> None:
    inputs = draw(20) if gate else raw(-torch.ones(1, 20, HEADS, SIZE).double(), draw(20))
    mixed = {n: x if n == wide else x.float() for n, x in inputs.items()}
    flags = GATED if gate else NORMED
    out, state = form(**mixed, **flags, output_final_state=True)
    expected, last = naive_kda(
        **{n: x.double() for n, x in mixed.items()}, **flags, output_final_state=True
    )
    assert state is not None and last is not None and state.dtype == torch.float64
    assert out.dtype == mixed["v"].dtype
    torch.testing.assert_close(state, last, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("flags", [GATED, NORMED])
@pytest.mark.parametrize("form", FORMS)
def test_without_tokens_the_given_state_is_not_handed_out(
    form: Form, flags: dict[str, Any]
) -> None:
    state = torch.ones(1, HEADS, SIZE, SIZE)
    inputs = {name: x.float() for name, x in draw(0).items()}
    _, final = form(**inputs, **flags, initial_state=state, output_final_state=True)
    assert final is not None
    final.zero_()
    assert bool(state.all())


@pytest.mark.parametrize("form", FORMS)
def test_no_sequences_have_no_states(form: Form) -> None:
    out, final = form(**draw(5, batch=0), **GATED, output_final_state=True)
    assert final is not None
    assert out.shape == (0, 5, HEADS, SIZE) and final.shape == (0, HEADS, SIZE, SIZE)


@pytest.mark.parametrize(
    ("bound", "shapes", "named"),
    [
        (-6.0, (2, 16), "lower_bound"),
        (1.0, (2, 16), "lower_bound"),  # decays above 0
        (math.nan, (2, 16), "lower_bound"),
        (-5.0, (1, 16), "A_log"),  # would count for both heads
        (-5.0, (2, 8), "dt_bias"),
    ],
)
def test_the_gate_alone_names_what_does_not_fit(
    bound: float, shapes: tuple[int, int], named: str
) -> None:
    a_log, dt_bias = map(torch.zeros, shapes)
    with pytest.raises(ValueError, match=named):
        kda_gate(torch.zeros(1, 3, HEADS, SIZE), a_log, dt_bias, bound)
