"""Weight clipping of K2 on latent attention, against logits computed pair by pair."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from farhorizon.policy import Policy, PolicyConfig, attention
from farhorizon.policy.attention import GatedMLA
from farhorizon.policy.qk_clip import clip_factors, forget, logit_maxima, watched_logits

LENGTHS = (5, 9, 2, 9)
BOUNDS = torch.tensor([0, 5, 14, 16, 25])


def made(q_lora_rank: int | None = 32) -> tuple[Policy, GatedMLA]:
    """A policy in fp64 whose one MLA layer has three heads and logits of some size."""
    torch.manual_seed(0)
    config = PolicyConfig.tiny(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=3,
        q_lora_rank=q_lora_rank,
        qk_rope_head_dim=8,
    )
    policy = Policy(config).double()
    layer = policy.model.layers[1].self_attn
    assert isinstance(layer, GatedMLA)
    with torch.no_grad():
        layer.kv_b_proj.weight.mul_(torch.tensor([6.0, 2.0, 1.0]).repeat_interleave(48)[:, None])
    return policy, layer


def logits(policy: Policy, layer: GatedMLA, ids: Tensor) -> list[Tensor]:
    """Causal logits [pairs, H] of each sequence, from the layer's projections."""
    given: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, arguments: given.append(arguments[0]))
    policy(ids[None], BOUNDS)
    hook.remove()
    x = given[0].detach()
    with torch.no_grad():
        if layer.low_rank_query:
            query = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(x)))
        else:
            query = layer.q_proj(x)
        latent, rope = layer.kv_a_proj_with_mqa(x).split([layer.rank, layer.rope], -1)
        keys = layer.kv_b_proj(layer.kv_a_layernorm(latent))
    query = query.view(len(x), 3, -1)
    keys = keys.view(len(x), 3, -1)[..., : layer.nope]
    out, start = [], 0
    for length in LENGTHS:
        pairs = []
        for i in range(start, start + length):
            for j in range(start, i + 1):
                plain = (query[i, :, : layer.nope] * keys[j]).sum(-1)
                shared = (query[i, :, layer.nope :] * rope[j]).sum(-1)
                pairs.append((plain + shared) * (layer.nope + layer.rope) ** -0.5)
        out.append(torch.stack(pairs))
        start += length
    return out


@pytest.mark.parametrize("q_lora_rank", [32, None])
@pytest.mark.parametrize("max_scores", [1 << 26, 100])
def test_heads_above_the_threshold_come_down_to_it(
    monkeypatch: pytest.MonkeyPatch, q_lora_rank: int | None, max_scores: int
) -> None:
    monkeypatch.setattr(attention, "MAX_SCORES", max_scores)
    policy, layer = made(q_lora_rank)
    ids = torch.randint(0, 64, (25,))
    before = torch.cat(logits(policy, layer, ids))
    with watched_logits(policy):
        policy(ids[None], BOUNDS)
    (maxima,) = logit_maxima(policy)
    assert maxima.tolist() == pytest.approx(before.amax(0).tolist(), rel=1e-6)
    threshold = float(maxima.sort().values[1]) * 1.01  # one head of three is above it
    factors = clip_factors(policy, threshold)
    query = "q_b_proj" if q_lora_rank else "q_proj"
    name = "model.layers.1.self_attn"
    assert set(factors) == {f"{name}.{query}.weight", f"{name}.kv_b_proj.weight"}
    head = int(maxima.argmax())
    gamma = threshold / float(maxima[head])
    rows = factors[f"{name}.{query}.weight"].view(3, 24)
    assert rows[head].tolist() == pytest.approx([gamma**0.5] * 16 + [gamma] * 8)
    kept = factors[f"{name}.kv_b_proj.weight"].view(3, 48)
    assert kept[head].tolist() == pytest.approx([gamma**0.5] * 16 + [1.0] * 32)
    others = [number for number in range(3) if number != head]
    assert torch.equal(rows[others], torch.ones(2, 24))
    with torch.no_grad():
        for key, factor in factors.items():
            policy.get_parameter(key).mul_(factor[:, None])
    after = torch.cat(logits(policy, layer, ids))
    assert torch.allclose(after[:, head], gamma * before[:, head], rtol=1e-6)
    assert torch.equal(after[:, others], before[:, others])
    assert float(after.max()) == pytest.approx(threshold)


def test_only_watched_forwards_count_and_the_largest_stays() -> None:
    policy, _ = made()
    ids = torch.randint(0, 64, (25,))
    plain = policy(ids[None], BOUNDS).logits
    assert not bool(logit_maxima(policy)[0].any()) and clip_factors(policy, 1e-3) == {}
    with watched_logits(policy):
        assert torch.equal(policy(ids[None], BOUNDS).logits, plain)
        first = logit_maxima(policy)[0].clone()
        policy(ids[None, :2], torch.tensor([0, 2]))
    policy(ids.flip(0)[None], BOUNDS)
    assert torch.equal(logit_maxima(policy)[0], first) and bool((first > 0).all())
    forget(policy)
    assert not bool(logit_maxima(policy)[0].any())
    assert "logit_max" not in "".join(policy.state_dict())
