"""K3 as a whole against an oracle in fp64 that is written from the formulas, one number at a time.

It shares nothing with the policy but the names of tensors. Norm weights, depth queries, thresholds
and decays are drawn, so that none of them can be left out unseen.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farhorizon.policy import Policy, PolicyConfig

Tensor = torch.Tensor


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def situ(a: Tensor, b: Tensor) -> Tensor:
    return 4 * torch.tanh(a / 4) * torch.sigmoid(a) * 25 * torch.tanh(b / 25)


def mix(sources: list[Tensor], norm: Tensor, query: Tensor, eps: float) -> Tensor:
    """A softmax over depth of the normed sources' products with the query."""
    scores = torch.stack(
        [(norm * query[0] * v).sum(-1) / torch.sqrt((v * v).mean(-1) + eps) for v in sources]
    )
    mixed = torch.zeros_like(sources[0])
    for share, source in zip(scores.softmax(0), sources, strict=True):
        mixed += share[:, None] * source
    return mixed


class Oracle:
    """The logits of one sequence from a state dict."""

    def __init__(self, config: PolicyConfig, state: dict[str, Tensor]) -> None:
        self.config, self.state, self.eps = config, state, config.rms_norm_eps

    def __call__(self, ids: Tensor) -> Tensor:
        config, blocks, partial = self.config, [], self.state["model.embed_tokens.weight"][ids]
        assert config.attn_res_block_size is not None and config.linear_attn_config is not None
        for i in range(config.num_hidden_layers):
            layer = f"model.layers.{i}."
            h = self.mix([*blocks, partial], f"{layer}self_attention_res") if blocks else partial
            boundary = i % config.attn_res_block_size == 0
            if boundary:
                blocks.append(partial)
            full = i + 1 in config.linear_attn_config["full_attn_layers"]
            normed = self.rms(h, f"{layer}input_layernorm")
            attended = (self.mla if full else self.kda)(f"{layer}self_attn.", normed)
            partial = attended if boundary else partial + attended
            h = self.mix([*blocks, partial], f"{layer}mlp_res")
            normed = self.rms(h, f"{layer}post_attention_layernorm")
            dense = i < config.first_k_dense_replace
            fed = self.mlp(f"{layer}mlp.", normed) if dense else self.moe(layer, normed)
            partial = partial + fed
        h = self.rms(self.mix([*blocks, partial], "model.output_attn_res"), "model.norm")
        return self.linear(h, "lm_head")

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.state[f"{name}.weight"].T

    def rms(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        return rms(x, self.state[f"{name}.weight"], self.eps if eps is None else eps)

    def mix(self, sources: list[Tensor], site: str) -> Tensor:
        norm, query = (self.state[f"{site}_{part}.weight"] for part in ("norm", "proj"))
        return mix(sources, norm, query, self.eps)

    def mlp(self, at: str, x: Tensor) -> Tensor:
        gate, up = (self.linear(x, f"{at}{part}_proj") for part in ("gate", "up"))
        return self.linear(situ(gate, up), f"{at}down_proj")

    def moe(self, layer: str, x: Tensor) -> Tensor:
        at = f"{layer}block_sparse_moe."
        scores = torch.sigmoid(self.linear(x, f"{at}gate"))
        biased = scores + self.state[f"{at}gate.e_score_correction_bias"].double()
        z = self.linear(x, f"{at}routed_expert_down_proj")
        w1, w2, w3 = (self.state[f"{at}experts.w{n}"] for n in (1, 2, 3))
        summed = torch.zeros_like(z)
        for t in range(len(x)):
            chosen = biased[t].topk(self.config.num_experts_per_token).indices
            share = scores[t, chosen] / (scores[t, chosen].sum() + 1e-20)
            for e, p in zip(chosen, share * self.config.routed_scaling_factor, strict=True):
                summed[t] += p * (w2[e] @ situ(w1[e] @ z[t], w3[e] @ z[t]))
        routed = self.linear(
            self.rms(summed, f"{at}routed_expert_norm"), f"{at}routed_expert_up_proj"
        )
        return routed + self.mlp(f"{at}shared_experts.", x)

    def conv(self, x: Tensor, name: str) -> Tensor:
        """Causal, each channel on its own, then SiLU; the last weight is of the token itself."""
        weight, out = self.state[f"{name}.weight"][:, 0], torch.zeros_like(x)
        width = weight.shape[1]
        for t in range(len(x)):
            for back in range(min(width, t + 1)):
                out[t] += weight[:, width - 1 - back] * x[t - back]
        return out * torch.sigmoid(out)

    def kda(self, at: str, x: Tensor) -> Tensor:
        assert self.config.linear_attn_config is not None
        heads, size = (self.config.linear_attn_config[n] for n in ("num_heads", "head_dim"))
        q, k, v = (
            self.conv(self.linear(x, f"{at}{n}_proj"), f"{at}{n}_conv1d").view(-1, heads, size)
            for n in "qkv"
        )
        q, k = (y / torch.sqrt((y * y).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
        q = q * size**-0.5
        beta = torch.sigmoid(self.linear(x, f"{at}b_proj"))
        z = self.linear(self.linear(x, f"{at}f_a_proj"), f"{at}f_b_proj")
        z = (z + self.state[f"{at}dt_bias"]).view(-1, heads, size)
        decay = torch.exp(-5 * torch.sigmoid(self.state[f"{at}A_log"].exp()[:, None] * z))
        out = torch.zeros_like(v)
        for h in range(heads):
            memory = torch.zeros(size, size, dtype=x.dtype)
            for t in range(len(x)):
                memory = decay[t, h, :, None] * memory
                error = v[t, h] - k[t, h] @ memory
                memory = memory + beta[t, h] * torch.outer(k[t, h], error)
                out[t, h] = q[t, h] @ memory
        gate = torch.sigmoid(self.linear(x, f"{at}g_proj")).view(-1, heads, size)
        return self.linear((self.rms(out, f"{at}o_norm") * gate).flatten(1), f"{at}o_proj")

    def mla(self, at: str, x: Tensor) -> Tensor:
        config, heads = self.config, self.config.num_attention_heads
        nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        eps = 1e-6 if config.mla_norm_eps is None else config.mla_norm_eps
        low = self.rms(self.linear(x, f"{at}q_a_proj"), f"{at}q_a_layernorm", eps)
        q = self.linear(low, f"{at}q_b_proj").view(-1, heads, nope + rope)
        latent = self.linear(x, f"{at}kv_a_proj_with_mqa")
        latent, shared = latent[:, : config.kv_lora_rank], latent[:, config.kv_lora_rank :]
        kv = self.linear(self.rms(latent, f"{at}kv_a_layernorm", eps), f"{at}kv_b_proj")
        kv = kv.view(-1, heads, nope + value)
        out = torch.zeros(len(x), heads, value, dtype=x.dtype)
        for h in range(heads):
            for t in range(len(x)):
                keys = torch.cat([kv[: t + 1, h, :nope], shared[: t + 1]], 1)
                weights = (keys @ q[t, h] * (nope + rope) ** -0.5).softmax(0)
                out[t, h] = weights @ kv[: t + 1, h, nope:]
        gate = torch.sigmoid(self.linear(x, f"{at}g_proj"))
        return self.linear(gate * out.flatten(1), f"{at}o_proj")


def drawn(**changes: Any) -> Policy:
    """A policy in which no number is at its starting value."""
    torch.manual_seed(0)
    policy = Policy(PolicyConfig.tiny(vocab_size=64, **changes)).double().eval()
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "norm.weight" in name:
                parameter.normal_(1, 0.3)
            elif name.endswith("_res_proj.weight"):
                parameter.normal_(0, 0.5)
            elif name.endswith("A_log"):
                parameter.uniform_(-1, 1)
        for router in policy.routers():
            router.e_score_correction_bias.normal_(0, 0.1)
    return policy


SHAPES: list[dict[str, Any]] = [
    {},
    {"num_hidden_layers": 9, "attn_res_block_size": 4},
    {
        **{"num_hidden_layers": 6, "attn_res_block_size": 3, "mla_norm_eps": None},
        **{"v_head_dim": 11, "routed_scaling_factor": 1.7, "num_shared_experts": 2},
    },
]


@pytest.mark.parametrize("changes", SHAPES, ids=["tiny", "nine", "odd"])
@torch.no_grad()
def test_logits_are_those_of_the_formulas(changes: dict[str, Any]) -> None:
    policy = drawn(**changes)
    ids = torch.randint(64, (29,))
    wanted = Oracle(policy.config, policy.state_dict())(ids)
    assert float(wanted.std()) > 0.5
    torch.testing.assert_close(policy(ids[None]).logits[0], wanted, atol=1e-11, rtol=0)


@torch.no_grad()
def test_every_tensor_counts() -> None:
    """The oracle itself must see each of them, or the policy could leave it out as well."""
    policy = drawn()
    ids = torch.randint(64, (12,))
    state = {name: tensor.double() for name, tensor in policy.state_dict().items()}
    wanted = Oracle(policy.config, state)(ids)
    for name, tensor in state.items():
        if name.startswith("model.layers.0.self_attention_res"):
            continue  # the first layer reads the bare embedding
        changed = state | {name: tensor + 0.5 * torch.randn_like(tensor)}
        moved = float((Oracle(policy.config, changed)(ids) - wanted).abs().max())
        assert moved > 1e-4, f"{name}: {moved:.0e}"
