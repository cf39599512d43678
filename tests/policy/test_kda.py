"""The KDA layer: what autocast may round, and how its gate starts."""

from __future__ import annotations

import pytest
import torch

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
