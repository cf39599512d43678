"""Training with rounded experts: the forward is that of the export, the gradient goes through."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from farhorizon.kernels.moe import mxfp4_rounded
from farhorizon.policy import DecodeState, Policy, PolicyConfig
from farhorizon.policy.checkpoint import load_policy, save_policy

IDS = torch.arange(48)[None] * 7 % 64
EXPERTS = (".experts.w1", ".experts.w2", ".experts.w3")


def rounding(latent: int | None = 32, **changes: object) -> Policy:
    torch.manual_seed(0)
    config = PolicyConfig.tiny(
        **{"vocab_size": 64, "routed_expert_hidden_size": latent, "expert_fake_quant": True},
        **({"latent_moe_use_norm": False} if latent is None else {}),
        **changes,
    )
    return Policy(config)


def plain(folder: Path, dtype: torch.dtype | None = None) -> Policy:
    """The policy of a folder as one that knows nothing of rounding reads it."""
    policy = load_policy(folder, dtype)
    for module in policy.modules():
        if hasattr(module, "rounded"):
            setattr(module, "rounded", False)  # noqa: B010 (not a tensor, as its type would have it)
    return policy


@pytest.mark.parametrize("latent", [32, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_is_that_of_the_export_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, latent: int | None
) -> None:
    policy = rounding(latent).to(dtype).eval()  # type: ignore[arg-type] - Module.to
    save_policy(tmp_path / "p", policy, export=True)
    exported = plain(tmp_path / "p", dtype)
    for name, weight in policy.named_parameters():
        if name.endswith(EXPERTS):
            found = exported.get_parameter(name)
            assert torch.equal(found, mxfp4_rounded(weight)) and not torch.equal(found, weight)
    assert torch.equal(policy(IDS).logits, exported(IDS).logits)
    with torch.no_grad():  # few tokens run through all experts at once
        for ids in (IDS[:, :3], IDS):
            assert torch.equal(policy(ids).logits, exported(ids).logits)
        states = [DecodeState.empty(policy.config, 1, dtype=dtype) for _ in range(2)]
        pair = zip((policy, exported), states, strict=True)
        one, other = (p(IDS[:, :5], state=state).logits for p, state in pair)
        assert torch.equal(one, other)
    # autocast rounds what was rounded: the same weights reach the products
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(policy(IDS).logits, exported(IDS).logits)
    # and an exported policy that goes on training with rounding computes the same
    assert torch.equal(load_policy(tmp_path / "p", dtype)(IDS).logits, exported(IDS).logits)


def test_the_gradient_is_that_of_the_rounded_weights(tmp_path: Path) -> None:
    policy = rounding()
    save_policy(tmp_path / "p", policy, export=True)
    exported = plain(tmp_path / "p", torch.float32)
    for each in (policy, exported):
        each(IDS, labels=IDS).loss.backward()
    for name, parameter in policy.named_parameters():
        expected = exported.get_parameter(name).grad
        assert (parameter.grad is None) == (expected is None), name
        if parameter.grad is not None and expected is not None:
            assert torch.equal(parameter.grad, expected), name
    moved = [p for n, p in policy.named_parameters() if n.endswith(EXPERTS)]
    assert all(bool(p.grad.any()) for p in moved if p.grad is not None) and len(moved) == 9


def test_masters_keep_what_rounding_hides() -> None:
    """Steps smaller than the distance of two codes add up in the weights that are kept."""
    policy = rounding()
    weight = policy.get_parameter("model.layers.1.block_sparse_moe.experts.w1")
    before, shown = weight.detach().clone(), mxfp4_rounded(weight).detach()
    with torch.no_grad():
        weight += 1e-4 * weight
    assert not torch.equal(weight, before)
    assert (mxfp4_rounded(weight) != shown).float().mean() < 0.01


def test_it_is_off_unless_asked_for_and_needs_whole_groups() -> None:
    assert not PolicyConfig.tiny().expert_fake_quant
    config = PolicyConfig.from_dict(rounding().config.to_dict())
    assert config.expert_fake_quant
    for field, value in (("routed_expert_hidden_size", 48), ("moe_intermediate_size", 16)):
        with pytest.raises(ValueError, match=rf"config\.json: {field}={value} must be a multiple"):
            PolicyConfig.tiny(expert_fake_quant=True, **{field: value})
    with pytest.raises(ValueError, match=r"hidden_size=48 must be a multiple of 32"):
        PolicyConfig.tiny(
            hidden_size=48,
            expert_fake_quant=True,
            moe_intermediate_size=32,
            routed_expert_hidden_size=None,
            latent_moe_use_norm=False,
        )
