"""Muon against singular value decompositions in fp64, head by head and expert by expert; groups."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from farhorizon.configs.schema import LearnerConfig
from farhorizon.policy import Policy, PolicyConfig
from farhorizon.policy.value import ValueHead
from farhorizon.rl import muon as muon_module
from farhorizon.rl.muon import Muon, orthogonalised, update_scale
from farhorizon.rl.optimizer import decays, lay_out, make_optimizer, matrices, uses_muon

WIDE = torch.float64
TINY = PolicyConfig.tiny(vocab_size=64, hidden_size=32, num_hidden_layers=2, v_head_dim=24)


def by_svd(matrix: Tensor) -> Tensor:
    """What five Newton-Schulz steps make of a matrix: the same of its singular values."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ v


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=WIDE)


@pytest.mark.parametrize("shape", [(8, 8), (4, 32), (32, 4), (1, 16), (16, 1)])
def test_newton_schulz_is_that_of_the_singular_values(shape: tuple[int, int]) -> None:
    matrix = random(*shape)
    got = orthogonalised(matrix)
    assert torch.allclose(got, by_svd(matrix), atol=1e-10)
    assert torch.allclose(orthogonalised(1e4 * matrix), got, atol=1e-10)  # whatever its size
    assert torch.allclose(orthogonalised(matrix.float()).double(), got, atol=1e-4)
    batch = torch.stack([matrix, random(*shape, seed=1)])
    assert torch.allclose(orthogonalised(batch)[1], by_svd(batch[1]), atol=1e-10)


def test_newton_schulz_comes_near_the_orthogonal_matrix() -> None:
    matrix = random(32, 96)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    assert float(s.min() / s.norm()) > 0.01
    values = torch.linalg.svdvals(orthogonalised(matrix))
    assert float(values.min()) > 0.65 and float(values.max()) < 1.25
    assert float((orthogonalised(matrix) - u @ v).norm()) < 0.35 * math.sqrt(32)
    rounded = torch.linalg.svdvals(orthogonalised(matrix.bfloat16()).double())
    assert float(rounded.min()) > 0.6 and float(rounded.max()) < 1.3


def test_nothing_is_blown_up() -> None:
    assert not bool(orthogonalised(torch.zeros(3, 4, 4)).any())
    assert float(orthogonalised(torch.full((4, 4), 1e-30)).abs().max()) < 1e-15


def test_the_update_has_the_root_mean_square_of_adam() -> None:
    for shape in ((16, 64), (64, 16), (40, 40)):
        u, _, v = torch.linalg.svd(random(*shape), full_matrices=False)
        full_rank = (u @ v) * update_scale(*shape)
        assert float(full_rank.square().mean().sqrt()) == pytest.approx(0.2)


def test_matrices_of_a_parameter() -> None:
    assert list(matrices((6, 5))) == [(0, 6, 5)]
    assert list(matrices((2, 3, 4))) == [(0, 3, 4), (12, 3, 4)]
    assert list(matrices((6, 5), (3,))) == [(0, 3, 5), (15, 3, 5)]
    assert list(matrices((6, 5), (1, 2))) == [(0, 1, 5), (5, 2, 5), (15, 1, 5), (20, 2, 5)]


def whole(policy: Policy, **settings: Any) -> Muon:
    """Muon over a policy that no engine has cut."""
    config = LearnerConfig(optimizer="muon", lr=0.01, **settings)
    optimizer = make_optimizer(dict(policy.named_parameters()), config)
    assert isinstance(optimizer, Muon)
    engine = SimpleNamespace(optimizer=optimizer, device=torch.device("cpu"))
    lay_out(engine, 0, policy)
    return optimizer


HEADS = {  # rows of the matrices of a projection in `TINY`, whose heads are two
    "self_attn.q_proj": [32, 32],
    "self_attn.k_proj": [32, 32],
    "self_attn.v_proj": [32, 32],
    "self_attn.q_b_proj": [32, 32],
    "self_attn.kv_b_proj": [16, 24, 16, 24],
}


@pytest.mark.parametrize("limit", [1 << 26, 1])
def test_every_head_and_expert_is_optimized_alone(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """Two steps against the formula, matrix by matrix: M = 0.95 M + G, W = W (1 - lr decay) -
    lr 0.2 sqrt(max(n, m)) NS(M)."""
    monkeypatch.setattr(muon_module, "BATCH_NUMBERS", limit)
    torch.manual_seed(0)
    policy = Policy(TINY).double()
    optimizer = whole(policy, weight_decay=0.1)
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    momentum = {name: torch.zeros_like(p) for name, p in before.items()}
    for step in range(2):
        for number, (name, parameter) in enumerate(policy.named_parameters()):
            parameter.grad = random(*parameter.shape, seed=100 * step + number)
            momentum[name] = 0.95 * momentum[name] + parameter.grad
            kept = 1 - 0.01 * 0.1 if decays(name, parameter) else 1.0
            before[name] *= kept
            if not uses_muon(name, parameter):
                continue
            module = ".".join(name.split(".")[-3:-1])
            pieces = (
                list(momentum[name])
                if parameter.ndim == 3
                else list(momentum[name].split(HEADS.get(module, [len(parameter)])))
            )
            updates = [0.2 * math.sqrt(max(piece.shape)) * by_svd(piece) for piece in pieces]
            update = torch.stack(updates) if parameter.ndim == 3 else torch.cat(updates)
            before[name] -= 0.01 * update
        optimizer.step()
    seen = set()
    for name, parameter in policy.named_parameters():
        if uses_muon(name, parameter):
            assert torch.allclose(parameter, before[name], atol=1e-12), name
            seen.add(".".join(name.split(".")[-3:-1]))
    assert seen >= HEADS.keys() and any("experts" in name for name in before)


def test_a_whole_matrix_would_give_another_update() -> None:
    matrix = random(8, 16)
    halves = torch.cat([orthogonalised(matrix[:4]), orthogonalised(matrix[4:])])
    assert float((orthogonalised(matrix) - halves).abs().max()) > 0.05


def test_what_is_no_matrix_gets_adamw_to_the_bit() -> None:
    torch.manual_seed(0)
    policy, same = Policy(TINY), Policy(TINY)
    same.load_state_dict(policy.state_dict())
    optimizer = whole(policy)
    others = [p for n, p in same.named_parameters() if not uses_muon(n, p)]
    adam = torch.optim.AdamW(others, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for step in range(2):
        for made in (policy, same):
            for number, parameter in enumerate(made.parameters()):
                parameter.grad = random(*parameter.shape, seed=step * 100 + number).float()
        optimizer.step()
        adam.step()
    for (name, mine), other in zip(policy.named_parameters(), same.parameters(), strict=True):
        assert uses_muon(name, mine) or torch.equal(mine, other), name
    assert {key for state in optimizer.state.values() for key in state} == {
        *("momentum_buffer", "exp_avg", "exp_avg_sq", "step")
    }


def test_the_default_is_torchs_adamw_in_one_group() -> None:
    optimizer = make_optimizer(dict(Policy(TINY).named_parameters()), LearnerConfig())
    assert type(optimizer) is torch.optim.AdamW
    (group,) = optimizer.param_groups
    assert group["weight_decay"] == 0 and group["lr"] == 1e-6 and group["fused"]
    assert len(group["params"]) == len(list(Policy(TINY).parameters()))


def leaves(policy: Policy, chosen: Any) -> set[str]:
    """Names within a layer, or of the policy, of the parameters that ``chosen`` takes."""
    parameters = dict(policy.named_parameters())
    return {
        name.split(".", 3)[-1] if ".layers." in name else name
        for name, parameter in parameters.items()
        if chosen(name, parameter)
    }


def test_decay_spares_gates_norms_vectors_and_embeddings() -> None:
    policy = Policy(TINY)
    policy.v_head = ValueHead(32)
    decayed = leaves(policy, decays)
    assert decayed == {
        *(f"self_attn.{x}_proj.weight" for x in ("q", "k", "v", "o", "q_a", "q_b", "kv_b")),
        *(f"self_attn.{x}_conv1d.weight" for x in "qkv"),
        "self_attn.kv_a_proj_with_mqa.weight",
        *(f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
        *(f"block_sparse_moe.shared_experts.{x}_proj.weight" for x in ("gate", "up", "down")),
        *(f"block_sparse_moe.experts.w{n}" for n in (1, 2, 3)),
        *(f"block_sparse_moe.routed_expert_{x}_proj.weight" for x in ("up", "down")),
        "lm_head.weight",
    }
    assert not decays("vision_tower.patch_embed.pos_emb.weight", torch.zeros(4, 4, 8))
    spared = leaves(policy, lambda n, p: not decays(n, p))
    assert {"self_attn.A_log", "self_attn.dt_bias", "self_attn.b_proj.weight"} <= spared
    assert {"self_attn.g_proj.weight", "block_sparse_moe.gate.weight"} <= spared
    assert {"self_attention_res_proj.weight", "model.output_attn_res_proj.weight"} <= spared
    assert {"model.embed_tokens.weight", "model.norm.weight", "v_head.summary.weight"} <= spared


def test_muon_takes_the_matrices_of_the_layers() -> None:
    policy = Policy(TINY)
    policy.v_head = ValueHead(32)
    adam = leaves(policy, lambda n, p: not uses_muon(n, p))
    norms = {name for name in adam if "norm" in name}
    assert adam - norms == {
        *("self_attn.A_log", "self_attn.dt_bias"),
        *(f"self_attn.{x}_conv1d.weight" for x in "qkv"),
        *("self_attention_res_proj.weight", "mlp_res_proj.weight"),
        *("model.embed_tokens.weight", "model.output_attn_res_proj.weight", "lm_head.weight"),
        *("v_head.summary.weight", "v_head.summary.bias"),
    }


def test_muon_descends() -> None:
    """A tiny policy learns a batch by heart, from ln 64 = 4.2 nats."""
    torch.manual_seed(0)
    policy = Policy(TINY)
    ids = torch.randint(0, 64, (4, 24))
    optimizer = whole(policy, weight_decay=0.1)
    losses = []
    for _ in range(30):
        loss = policy(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] > 3.9 and losses[-1] < 0.5
