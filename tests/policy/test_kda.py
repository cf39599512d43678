"""The KDA layer: what autocast may round, and how its gate starts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from farhorizon.policy import DecodeState, PolicyConfig
from farhorizon.policy.kda import KimiDeltaAttention
from farhorizon.policy.packing import Packing
from farhorizon.policy.state import KdaState


@pytest.mark.parametrize("pieces", [(37,), (36, 1)])
def test_autocast_rounds_the_projections_and_not_the_recurrence(pieces: tuple[int, ...]) -> None:
    """A layer of bf16 parameters has bf16 projections and no autocast, so nothing else is rounded:
    autocast over the same numbers in fp32 must give exactly that, the fp32 state included."""
    torch.manual_seed(0)
    config = PolicyConfig.tiny()
    rounded = KimiDeltaAttention(config)
    for parameter in rounded.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    rounded.bfloat16()
    wide = KimiDeltaAttention(config)
    wide.load_state_dict(rounded.state_dict())
    x = torch.randn(sum(pieces), config.hidden_size).bfloat16()
    results = []
    for layer, given, autocast in ((rounded, x, False), (wide, x.float(), True)):
        state = DecodeState.empty(config, 1).layers[0]
        assert isinstance(state, KdaState)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = [
                layer(piece, Packing.of((0, len(piece)), x.device), state)
                for piece in given.split(list(pieces))
            ]
        assert state.recurrent.dtype == torch.float32
        results.append([torch.cat(out), state.recurrent])
    assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][0], results[1][0])


def test_the_gate_starts_as_published() -> None:
    """exp(A) is 1 with a bound, spread over [1, 16] without; the bias is softplus^-1 of 0.001 to
    0.1 in both."""
    torch.manual_seed(0)
    for bound in (-5.0, None):
        linear = (PolicyConfig.tiny().linear_attn_config or {}) | {"gate_lower_bound": bound}
        config = PolicyConfig.tiny(linear_attn_config=linear)
        rates, steps = [], []
        for _ in range(100):
            layer = KimiDeltaAttention(config)
            layer.init_gate()
            rates.append(layer.A_log.detach().exp())
            steps.append(torch.nn.functional.softplus(layer.dt_bias.detach()))
        rate, step = torch.cat(rates), torch.cat(steps)
        assert 0.001 <= float(step.min()) < 0.0015 and 0.07 < float(step.max()) <= 0.1001
        if bound is not None:
            assert torch.equal(rate, torch.ones_like(rate))
            continue
        assert 1 <= float(rate.min()) < 2 and 15 < float(rate.max()) <= 16.0001
        assert float(rate.mean()) == pytest.approx(8.5, abs=1)


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj"])
@pytest.mark.parametrize(
    "kind", ["wrapped", "pre-hook", "hook", "forward", "bias", "backward-hook"]
)
def test_what_surrounds_a_projection_acts(kind: str, part: str) -> None:
    """Adapters, hooks and biases of the three projections, which else run as one product."""
    torch.manual_seed(0)
    layer = KimiDeltaAttention(PolicyConfig.tiny())
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, packing = torch.randn(9, layer.q_proj.in_features), Packing.of((0, 9), torch.device("cpu"))
    before = layer(x, packing, None)
    linear: nn.Linear = getattr(layer, part)
    called: list[str] = []
    if kind == "wrapped":
        setattr(layer, part, nn.Sequential(linear, nn.Hardtanh(-1e-3, 1e-3)))
    elif kind == "pre-hook":
        linear.register_forward_pre_hook(lambda _, given: (given[0] * 0.5,))
    elif kind == "hook":
        linear.register_forward_hook(lambda _, given, out: out * 0.5 + 1)
    elif kind == "forward":
        vars(linear)["forward"] = lambda given: given[:, : linear.out_features] * 0 + 1
    elif kind == "bias":
        linear.bias = nn.Parameter(torch.ones(linear.out_features))
    else:
        linear.register_full_backward_hook(lambda *_: called.append(kind))
    after = layer(x.requires_grad_(), packing, None)
    after.sum().backward()
    if kind == "backward-hook":
        assert called
    else:
        assert float((after - before).detach().abs().max()) > 1e-4
