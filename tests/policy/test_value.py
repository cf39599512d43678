"""The value head: right values and gradients, bit for bit in its own file, nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from farhorizon.configs.errors import UserError
from farhorizon.policy import Policy, PolicyConfig
from farhorizon.policy.checkpoint import load_checkpoint, load_policy, save_checkpoint, save_policy
from farhorizon.policy.records import StageRecord
from farhorizon.policy.tokenizer import tokenizer_sha256, train_tokenizer
from farhorizon.policy.value import VALUE_FILE, ValueHead, token_values

CONFIG = PolicyConfig.tiny(vocab_size=300, hidden_size=32, num_hidden_layers=2)
WEIGHT, BIAS = "v_head.summary.weight", "v_head.summary.bias"
IDS = torch.arange(12)[None] * 7 % 300
EDGES = torch.tensor([0, 5, 12], dtype=torch.int32)
ROWS = torch.tensor([0, 3, 5, 11])


def policy(head: bool = True) -> Policy:
    torch.manual_seed(0)
    made = Policy(CONFIG)
    if head:
        made.v_head = ValueHead(32)
        torch.nn.init.normal_(made.v_head.summary.weight)
        torch.nn.init.normal_(made.v_head.summary.bias)
    return made


def test_the_first_values_are_zero_and_learn() -> None:
    made = policy(head=False)
    assert made(IDS, EDGES).value is None
    made.v_head = ValueHead(32)
    assert {n: tuple(p.shape) for n, p in made.v_head.named_parameters(prefix="v_head")} == {
        WEIGHT: (1, 32),
        BIAS: (1,),
    }
    values = token_values(made, IDS, EDGES, ROWS)
    assert values.shape == (4,) and values.dtype == torch.float32
    assert torch.equal(values, torch.zeros(4))
    (values - torch.tensor([1.0, 2, 3, 4])).square().sum().backward()
    assert made.v_head.summary.bias.grad == pytest.approx(-20.0)
    assert bool(made.v_head.summary.weight.grad.any())  # type: ignore[union-attr]


def test_values_are_a_weighted_sum_of_the_final_hidden_state() -> None:
    made = policy()
    out = made(IDS, EDGES)
    weight, bias = made.v_head.summary.weight, made.v_head.summary.bias  # type: ignore[union-attr]
    by_hand = (out.last_hidden_state * weight[0]).sum(-1) + bias
    assert out.value.shape == (1, 12) and torch.allclose(out.value, by_hand, atol=1e-5)
    picked = token_values(made, IDS, EDGES, ROWS)
    assert torch.allclose(picked, by_hand[0, ROWS], atol=1e-5)
    scored = made(IDS, EDGES, rows=ROWS, targets=torch.zeros(4, dtype=torch.long))
    assert torch.allclose(scored.value, picked, atol=1e-6)
    plain = policy(head=False)(IDS, EDGES, rows=ROWS, targets=torch.zeros(4, dtype=torch.long))
    assert torch.equal(scored.logprobs, plain.logprobs)
    alone = made(IDS[:, 5:], torch.tensor([0, 7])).value
    assert torch.allclose(alone[0], out.value[0, 5:], atol=1e-5)  # packed = alone


def test_the_gradient_is_that_of_finite_differences_in_fp64() -> None:
    made = policy().double()
    assert made.v_head is not None and made.v_head.summary.weight.dtype == torch.float64
    weights = torch.tensor([0.3, -1.0, 2.0, 0.7], dtype=torch.float64)

    def loss() -> Tensor:
        return (token_values(made, IDS, EDGES, ROWS).square() * weights).sum()

    loss().backward()
    torch.manual_seed(1)
    for name in (WEIGHT, BIAS, "model.norm.weight", "model.layers.1.self_attn.q_b_proj.weight"):
        parameter = made.get_parameter(name)
        direction = torch.randn_like(parameter)
        assert parameter.grad is not None
        slope = float((parameter.grad * direction).sum())
        ends = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                parameter.add_(direction, alpha=step)
                ends.append(float(loss()))
                parameter.sub_(direction, alpha=step)
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(slope, rel=1e-5), name


def test_the_head_stays_fp32_under_casts_and_autocast() -> None:
    made = policy().bfloat16()
    assert made.v_head is not None and made.v_head.summary.weight.dtype == torch.float32
    assert torch.equal(made.v_head.summary.weight, policy().state_dict()[WEIGHT])
    assert made(IDS, EDGES).value.dtype == torch.float32
    hidden = torch.randn(3, 32).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(made.v_head(hidden), made.v_head(hidden.float()))


def test_it_lies_beside_the_policy_and_comes_back_bit_for_bit(tmp_path: Path) -> None:
    made = policy()
    made.save_pretrained(tmp_path / "p")
    assert set(load_file(tmp_path / "p" / VALUE_FILE)) == {WEIGHT, BIAS}
    assert not any(
        name.startswith("v_head") for name in load_file(tmp_path / "p/model.safetensors")
    )
    for dtype in (None, torch.float32, torch.bfloat16):
        found = Policy.from_pretrained(tmp_path / "p", dtype=dtype).state_dict()
        assert list(found) == list(made.state_dict())
        for name in (WEIGHT, BIAS):
            assert found[name].dtype == torch.float32
            assert torch.equal(found[name], made.state_dict()[name])
    tokenizer = train_tokenizer(["one two\n"], 300)
    stage = StageRecord(512, (512,), 1, tokenizer_sha256(tokenizer))
    stream = iter(sorted(made.state_dict().items()))
    folder = save_checkpoint(tmp_path / "c", stream, CONFIG, tokenizer, stage)
    again = load_checkpoint(folder).policy
    assert again.v_head is not None and not again.training
    for name, tensor in made.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_exports_and_policies_without_one_have_no_file(tmp_path: Path) -> None:
    save_policy(tmp_path, policy())
    assert (tmp_path / VALUE_FILE).exists()
    save_policy(tmp_path, policy(head=False))  # into the same folder: no head of another policy
    assert not (tmp_path / VALUE_FILE).exists() and load_policy(tmp_path).v_head is None
    wide = PolicyConfig.tiny(vocab_size=300, num_hidden_layers=2)  # experts of width 32
    exported = Policy(wide)
    exported.v_head = ValueHead(64)
    save_policy(tmp_path / "export", exported, export=True)
    assert not (tmp_path / "export" / VALUE_FILE).exists()


def test_half_a_head_is_not_saved(tmp_path: Path) -> None:
    state = policy().state_dict()
    del state[BIAS]
    tokenizer = train_tokenizer(["one two\n"], 300)
    with pytest.raises(ValueError, match=r"v_head.summary.weight \[1, 32\] is no value head"):
        save_checkpoint(tmp_path / "c", state, CONFIG, tokenizer, StageRecord(8, (), 0, ""))
    assert not (tmp_path / "c").exists()


BAD: list[tuple[Callable[[dict[str, Tensor]], object], str]] = [
    (lambda t: t.pop(BIAS), "tensors missing: v_head.summary.bias"),
    (lambda t: t.update(extra=torch.zeros(1)), "tensors unknown: extra"),
    (
        lambda t: t.update({WEIGHT: torch.zeros(1, 31)}),
        r"tensors of the wrong shape: v_head.summary.weight \[1, 31\] instead of \[1, 32\]",
    ),
    (
        lambda t: t.update({BIAS: torch.tensor([float("nan")])}),
        "tensors that are not finite: v_head.summary.bias",
    ),
    (
        lambda t: t.update({BIAS: torch.tensor([1])}),
        "v_head.summary.bias has dtype I64, not floats",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_a_wrong_file_is_one_line(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    save_policy(tmp_path, policy())
    tensors = load_file(tmp_path / VALUE_FILE)
    change(tensors)
    save_file(tensors, tmp_path / VALUE_FILE)
    with pytest.raises(UserError, match=f"{VALUE_FILE}: {message}$") as caught:
        load_policy(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_torn_file_is_one_line(tmp_path: Path) -> None:
    save_policy(tmp_path, policy())
    file = tmp_path / VALUE_FILE
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"{VALUE_FILE}: damaged or truncated"):
        load_policy(tmp_path)
    file.unlink()
    file.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=f"{VALUE_FILE}: damaged or truncated"):
        load_policy(tmp_path)


def test_values_need_a_head() -> None:
    with pytest.raises(ValueError, match="the policy has no value head"):
        token_values(policy(head=False), IDS, EDGES, ROWS)
