"""Decode steps that change rows of a state where they lie."""

from __future__ import annotations

import pytest
import torch

from farhorizon.policy import DecodeState, Policy, PolicyConfig
from farhorizon.policy.decode import bucket_of, decode_logits, lay_out
from farhorizon.policy.joint import lay_together, stacked, together
from farhorizon.policy.kda import KimiDeltaAttention


@pytest.fixture
def policy() -> Policy:
    torch.manual_seed(0)
    found = Policy(PolicyConfig.tiny(vocab_size=64)).double().eval()
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "res_proj" in name:
                parameter.normal_(0, 0.5)
    return found


def weights_of(layer: KimiDeltaAttention) -> list[torch.Tensor]:
    return [part.weight for part in layer.projections() if isinstance(part, torch.nn.Linear)]


@torch.no_grad()
def test_steps_in_any_rows_are_those_of_a_forward(policy: Policy) -> None:
    ids = torch.randint(0, 64, (3, 9))
    whole = policy(ids).logits
    state = DecodeState.empty(policy.config, 5, dtype=torch.float64)
    state.reserve(9)
    first = torch.tensor([4, 0, 2])
    part = state.select(first)
    policy(ids[:, :6], state=part)
    state.put(first, part)
    kept = [t[1].clone() for layer in state.layers for t in layer.tensors()]
    past = torch.full((4,), 6, dtype=torch.int32)
    places = torch.tensor([4, 0, -1, 2], dtype=torch.int32)
    for t in range(6, 9):
        tokens = torch.stack((ids[0, t], ids[1, t], ids[0, 0], ids[2, t]))
        logits = decode_logits(policy, tokens, state, places, past)
        assert torch.allclose(logits[[0, 1, 3]], whole[:, t], atol=1e-12)
        past += 1
    others = [t[1] for layer in state.layers for t in layer.tensors()]
    assert all(torch.equal(a, b) for a, b in zip(kept, others, strict=True))


def test_weights_lie_together_and_stay_parameters(policy: Policy) -> None:
    before = {name: x.clone() for name, x in policy.state_dict().items()}
    with torch.inference_mode():
        lay_out(policy)
    after = policy.state_dict()
    assert all(torch.equal(after[name], x) for name, x in before.items())
    layer, other, *_ = (m for m in policy.modules() if isinstance(m, KimiDeltaAttention))
    weights = weights_of(layer)
    with torch.no_grad():
        found = together(weights)
        assert found is not None
        assert torch.equal(found[: sum(map(len, weights))], torch.cat(weights))
        weights[1].fill_(3.0)  # as a swap of weights does it
        assert float(found[len(weights[0])].sum()) == 3.0 * found.shape[1]
        weights[1].data = weights[1].clone()
        assert together(weights) is None
    with torch.enable_grad():
        assert together(weights_of(other)) is None


def test_weights_of_other_memory_are_copied() -> None:
    parts = [torch.nn.Parameter(torch.full((n, 2), float(n))) for n in (1, 2, 3)]
    with torch.no_grad():
        assert together(parts) is None
        assert stacked(parts)[:, 0].tolist() == [1, 2, 2, 3, 3, 3]
        lay_together(parts)
        found = together(parts)
        assert found is not None and found[:, 0].tolist() == [1, 2, 2, 3, 3, 3, 0, 0]
        assert together([parts[0], parts[2]]) is None


def test_buckets_hold_their_sequences_and_waste_less_than_half() -> None:
    assert [bucket_of(n) for n in (1, 2, 3, 5, 6, 7, 9, 13, 200, 256, 257)] == [
        *(1, 2, 4, 6, 6, 8, 12, 16, 256, 256, 384)
    ]
