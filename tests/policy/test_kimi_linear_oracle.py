"""Kimi-Linear against the `kimi_linear` model of transformers, on shared random weights in fp32.

Both are written from the same report by different hands. On what a published Kimi-Linear has, they
are one function: no positions anywhere (the part of queries and keys that is called rope is shared
by all heads and never turned), q and k scaled to length 1 with 1e-6 under the root, sigmoid scores
whose bias only chooses, weights that sum to ``routed_scaling_factor``, one shared expert beside,
short convolutions that see zeros before the first token. What differs, and how the tests go about
it:

- Theirs does norms, gates and the delta rule in fp32 whatever its weights are: the comparison is in
  fp32. Logits then differ by 3e-5; from ours in fp64, ours does by 1.3e-5 and theirs by 4e-5.
- Theirs takes ``log(1 + exp(x))`` for the softplus of the decay, which in fp32 is wrong by 6e-8, is
  multiplied by ``exp(A_log)``, up to 16, and added up over a chunk of 64. With ``F.softplus``, as
  ours, theirs is 2e-5 from fp64.
- Theirs norms the latents of attention with 1e-6 whatever ``rms_norm_eps`` is. So does ours where
  ``mla_norm_eps`` is not given, as in the published file: `test_the_epsilon_of_latents`.
- Theirs adds 1e-20 to the sum of the scores; nothing in fp32.
- Theirs cannot keep packed documents apart on a CPU; it runs each alone.
- Theirs has no bound on the decay, no gate on attention, no full-rank gate, no latent experts and
  no mixture over depth, and ignores the fields that ask for them: `test_what_theirs_does_not_read`.
- Without lists of layers theirs takes every fourth from the fifth on for attention, and the last is
  like any other; without ``routed_scaling_factor`` it takes 2.446 and ours 1. Published files have
  both: `test_the_published_sizes_are_theirs`.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import KimiLinearConfig, KimiLinearForCausalLM
from transformers.models.kimi_linear import modeling_kimi_linear as modeling

from farhorizon.kernels.kda import naive_kda
from farhorizon.launch.step_peers import bounded_decay
from farhorizon.policy import DecodeState, Policy, PolicyConfig

LENGTHS = (
    1,
    3,
    70,
    130,
)  # a single token, shorter than a convolution, over one chunk of 64 and two
FIELDS: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 2.446,
    "linear_attn_config": {
        "num_heads": 2,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 4],
        "full_attn_layers": [3, 5],
    },
}


@pytest.fixture(autouse=True)
def _plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Theirs in plain torch, also where the kernels that it would rather call are installed."""
    for name in (
        "chunk_kimi_delta_attention",
        "recurrent_kimi_delta_attention",
        "causal_conv1d_fn",
        "causal_conv1d_update",
    ):
        monkeypatch.setattr(modeling, name, inspect.unwrap(getattr(modeling, name)))


def draw_policy(**changes: Any) -> Policy:
    """A policy in which mistakes show: no norm, bias or decay has the value that it starts with."""
    config = PolicyConfig(**(FIELDS | changes))
    policy = Policy(config).eval()
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in policy.state_dict().items():
            noise = torch.randn(value.shape, generator=draw)
            if name.endswith(("norm.weight", "layernorm.weight")):
                value.copy_(1 + 0.3 * noise)
            elif name.endswith("A_log"):
                value.uniform_(1, 16, generator=draw).log_()
            elif name.endswith("dt_bias"):
                value.copy_(1.5 * noise - 4)
            elif name.endswith("e_score_correction_bias"):
                value.copy_(0.2 * noise)
            elif name.endswith("conv1d.weight"):
                value.copy_(0.5 * noise)
            elif name.endswith("embed_tokens.weight"):
                value.copy_(noise)
            else:
                value.copy_(noise * 1.3 / value.shape[-1] ** 0.5)
    return policy


def their_model(policy: Policy) -> Any:
    """Theirs with the weights of ``policy``, name by name."""
    config = policy.config
    linear = config.linear_attn_config or {}
    layers = range(config.num_hidden_layers)
    theirs: Any = KimiLinearForCausalLM(
        KimiLinearConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            moe_intermediate_size=config.moe_intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_attention_heads,
            n_shared_experts=config.num_shared_experts,
            routed_scaling_factor=config.routed_scaling_factor,
            kv_lora_rank=config.kv_lora_rank,
            q_lora_rank=config.q_lora_rank,
            qk_rope_head_dim=config.qk_rope_head_dim,
            qk_nope_head_dim=config.qk_nope_head_dim,
            v_head_dim=config.v_head_dim,
            num_experts_per_tok=config.num_experts_per_token,
            num_local_experts=config.num_experts,
            rms_norm_eps=config.rms_norm_eps,
            mlp_layer_types=["dense" if config.is_dense(i) else "sparse" for i in layers],
            layer_types=[
                "full_attention" if config.is_mla(i) else "linear_attention" for i in layers
            ],
            linear_head_dim=linear["head_dim"],
            linear_num_heads=linear["num_heads"],
            linear_conv_kernel_dim=linear["short_conv_kernel_size"],
            pad_token_id=None,
        )
    )
    found = theirs.load_state_dict(their_names(policy.state_dict()), strict=True)
    assert not found.missing_keys and not found.unexpected_keys
    return theirs.eval()


def their_names(ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors under their names and in their shapes."""
    made: dict[str, Tensor] = {}
    for name, value in ours.items():
        stem, _, last = name.rpartition(".self_attn.")
        name = name.replace(".block_sparse_moe.", ".mlp.")
        if last == "A_log":
            value = value.view(1, 1, -1, 1)
        if last.startswith(("f_a_proj", "f_b_proj", "A_log", "dt_bias")):
            name = f"{stem}.self_attn.forget_gate.{last}"
        if last in ("k_conv1d.weight", "v_conv1d.weight") or name.endswith(".experts.w3"):
            continue  # with q and w1
        if last == "q_conv1d.weight":
            parts = [ours[f"{stem}.self_attn.{part}_conv1d.weight"] for part in "qkv"]
            name, value = f"{stem}.self_attn.conv1d.weight", torch.cat(parts)
        if name.endswith(".experts.w1"):
            stem = name.removesuffix(".w1")
            up = ours[f"{stem.replace('.mlp.', '.block_sparse_moe.')}.w3"]
            name, value = f"{stem}.gate_up_proj", torch.cat([value, up], 1)
        if name.endswith(".experts.w2"):
            name = name.removesuffix("w2") + "down_proj"
        made[name] = value
    return made


def from_file(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Theirs as it reads a folder, and what it says of the tensors there."""
    model: Any = KimiLinearForCausalLM
    return model.from_pretrained(folder, output_loading_info=True)


def packed(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Random ids ``[1, T]`` of documents, and where they begin and end."""
    edges = torch.tensor([0, *itertools.accumulate(lengths)])
    draw = torch.Generator().manual_seed(len(lengths))
    return torch.randint(FIELDS["vocab_size"], (1, int(edges[-1])), generator=draw), edges


def alone(theirs: Any, ids: Tensor, edges: Tensor) -> Tensor:
    """Their logits ``[1, T, V]``, document by document."""
    bounds = itertools.pairwise(edges.tolist())
    return torch.cat([theirs(ids[:, a:b], use_cache=False).logits for a, b in bounds], 1)


def largest(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_lora_rank": 10},
        {"num_shared_experts": 2, "num_experts_per_token": 1, "first_k_dense_replace": 3},
        {"rms_norm_eps": 1e-3},
    ],
    ids=["published", "low-rank queries", "other experts", "large epsilon"],
)
@torch.no_grad()
def test_packed_documents_have_their_logits(changes: dict[str, Any]) -> None:
    policy = draw_policy(**changes)
    ids, edges = packed(LENGTHS)
    found, wanted = policy(ids, edges).logits, alone(their_model(policy), ids, edges)
    assert float(wanted.std()) > 1
    assert largest(found, wanted) < 1e-4


@torch.no_grad()
def test_every_layer_gives_what_theirs_gives() -> None:
    policy = draw_policy()
    theirs = their_model(policy)
    ids, _ = packed((130,))
    parts = ("self_attn", "mlp", "block_sparse_moe", "input_layernorm", "post_attention_layernorm")

    def outputs(model: nn.Module) -> list[tuple[str, Tensor]]:
        """Names and results ``[T, D]`` of the parts of all layers, in the order they ran in."""
        kept: list[tuple[str, Tensor]] = []
        hooks = []
        for name, module in model.named_modules():
            if name.count(".") == 3 and name.endswith(parts):
                name = name.replace("block_sparse_moe", "mlp")

                def keep(_: Any, __: Any, out: Any, name: str = name) -> None:
                    kept.append((name, (out[0] if isinstance(out, tuple) else out).view(130, -1)))

                hooks.append(module.register_forward_hook(keep))
        model(ids)
        for hook in hooks:
            hook.remove()
        return kept

    ours, other = outputs(policy), outputs(theirs)
    assert [name for name, _ in ours] == [name for name, _ in other] and len(ours) == 5 * 4
    for (name, found), (_, wanted) in zip(ours, other, strict=True):
        assert largest(found, wanted) < 2e-5 * max(1.0, float(wanted.abs().max())), name


def test_gradients_are_theirs() -> None:
    policy = draw_policy()
    theirs = their_model(policy)
    ids, edges = packed((70, 9))
    draw = torch.Generator().manual_seed(1)
    upstream = torch.randn(1, 79, FIELDS["vocab_size"], generator=draw) / 79
    policy(ids, edges).logits.backward(upstream)
    alone(theirs, ids, edges).backward(upstream)
    wanted = {name: p.grad for name, p in theirs.named_parameters()}
    found = their_names(
        {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    )
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        size = float(gradient.abs().max())
        assert size > 1e-4, name
        assert largest(found[name], gradient) < 1e-4 * max(1.0, size), name


@pytest.mark.parametrize("matched", [False, True])
@torch.no_grad()
def test_decoding_continues_as_theirs(matched: bool) -> None:
    policy = draw_policy()
    theirs = their_model(policy)
    ids = torch.stack([packed((76,))[0][0], packed((76,))[0][0].flip(0)])
    state = DecodeState.empty(policy.config, 2, matched=matched)
    first = theirs(ids[:, :70], use_cache=True)
    cache, wanted = first.cache, [first.logits]
    found = [policy(ids[:, :70], state=state).logits]
    for t in range(70, 76):
        found.append(policy(ids[:, t : t + 1], state=state).logits)
        wanted.append(theirs(ids[:, t : t + 1], cache=cache, use_cache=True).logits)
    assert largest(torch.cat(found, 1), torch.cat(wanted, 1)) < 1e-4


@torch.no_grad()
def test_a_saved_policy_is_read_by_theirs(tmp_path: Path) -> None:
    policy = draw_policy()
    policy.save_pretrained(tmp_path)
    theirs, report = from_file(tmp_path)
    assert not any(report.values()), report
    wanted = their_names(policy.state_dict())
    loaded = theirs.state_dict()
    assert loaded.keys() == wanted.keys()
    assert all(torch.equal(loaded[name], value) for name, value in wanted.items())
    ids, edges = packed(LENGTHS)
    assert largest(policy(ids, edges).logits, alone(theirs.eval(), ids, edges)) < 1e-4


def test_the_published_sizes_are_theirs() -> None:
    """All names and shapes of Kimi-Linear-48B-A3B, from its own file on both sides."""
    path = Path(__file__).parents[2] / "configs" / "policy" / "kimi-linear-48b.json"
    config: Any = PolicyConfig.from_json_file(path)
    other: Any = KimiLinearConfig.from_json_file(path)
    with torch.device("meta"):
        ours, theirs = Policy(config), KimiLinearForCausalLM(other)
    shapes = {name: value.shape for name, value in their_names(ours.state_dict()).items()}
    assert shapes == {name: value.shape for name, value in theirs.state_dict().items()}
    for name in ("rms_norm_eps", "routed_scaling_factor", "num_experts_per_tok", "q_lora_rank"):
        mine = name.replace("per_tok", "per_token")
        assert getattr(config, mine) == getattr(other, name), name
    kinds = [config.is_mla(i) for i in range(27)]
    assert kinds == [kind == "full_attention" for kind in other.layer_types]
    assert [config.is_dense(i) for i in range(27)] == [k == "dense" for k in other.mlp_layer_types]


@torch.no_grad()
def test_the_epsilon_of_latents() -> None:
    """Theirs has 1e-6 there, as ours by default; with latents this small another one shows."""
    small = {}
    for eps in (None, 1e-6, 1e-5):
        policy = draw_policy(mla_norm_eps=eps)
        for name, weight in policy.named_parameters():
            if name.endswith("kv_a_proj_with_mqa.weight"):
                weight.mul_(1e-3)
        ids, edges = packed((40,))
        small[eps] = largest(policy(ids, edges).logits, alone(their_model(policy), ids, edges))
    assert small[None] == small[1e-6] < 1e-4 and small[1e-5] > 1e-1


def _threshold(model: Any) -> None:
    model.model.layers[1].mlp.gate.e_score_correction_bias.neg_()


def _heads(model: Any) -> None:
    beta = model.model.layers[1].self_attn.b_proj.weight
    beta.copy_(beta.flip(0))


def _taps(model: Any) -> None:
    kernel = model.model.layers[0].self_attn.conv1d.weight
    kernel.copy_(kernel.flip(2))


def _scale(model: Any) -> None:
    model.model.layers[2].mlp.gate.routed_scaling_factor = 1.0


@pytest.mark.parametrize("mistake", [_threshold, _heads, _taps, _scale])
@torch.no_grad()
def test_a_mistake_shows(mistake: Any) -> None:
    policy = draw_policy()
    theirs = their_model(policy)
    mistake(theirs)
    ids, edges = packed((40,))
    assert largest(policy(ids, edges).logits, alone(theirs, ids, edges)) > 0.1


@torch.no_grad()
def test_a_bound_is_not_read_by_theirs() -> None:
    linear = FIELDS["linear_attn_config"] | {"gate_lower_bound": -5.0}
    policy = draw_policy(linear_attn_config=linear)
    ids, edges = packed((40,))
    assert largest(policy(ids, edges).logits, alone(their_model(policy), ids, edges)) > 0.1


@pytest.mark.parametrize(
    ("changes", "left_out"),
    [
        ({"mla_use_output_gate": True}, "model.layers.2.self_attn.g_proj.weight"),
        ({"attn_res_block_size": 2}, "model.output_attn_res_proj.weight"),
    ],
)
@torch.no_grad()
def test_what_theirs_does_not_read(changes: dict[str, Any], left_out: str, tmp_path: Path) -> None:
    """It leaves tensors in the file, goes on, and is another function."""
    policy = draw_policy(**changes)
    policy.save_pretrained(tmp_path)
    theirs, report = from_file(tmp_path)
    assert left_out in report["unexpected_keys"] and not report["missing_keys"]
    ids, edges = packed((40,))
    assert largest(policy(ids, edges).logits, alone(theirs.eval(), ids, edges)) > 0.1


def test_with_our_bound_it_is_our_bounded_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``farhorizon bench step`` times beside ours, with a definition for its kernel; then it
    has its own decay again."""
    kernel = ModuleType("fla.ops.kda")
    kernel.chunk_kda = definition  # type: ignore[attr-defined]
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.kda", kernel)
    linear = FIELDS["linear_attn_config"] | {"gate_lower_bound": -5.0, "use_full_rank_gate": False}
    policy = draw_policy(linear_attn_config=linear)
    theirs = their_model(policy)
    ids = torch.randint(96, (1, 70), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        unbounded, wanted = theirs(ids).logits, policy(ids).logits
        with bounded_decay(theirs):
            found = theirs(ids).logits
        assert torch.equal(theirs(ids).logits, unbounded)
    assert float((found - wanted).abs().max()) < 1e-4 < float((unbounded - wanted).abs().max())


def definition(*given: Tensor, safe_gate: bool, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Of their arguments ours has all but the one that chooses a kernel."""
    assert safe_gate
    return naive_kda(*given, **options)
