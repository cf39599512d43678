"""What callers of the Hugging Face interface hand in: padding, packing names, generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from farhorizon.policy import DecodeState, Policy, PolicyConfig


@pytest.fixture(scope="module")
def policy() -> Policy:
    torch.manual_seed(0)
    return Policy(PolicyConfig.tiny(vocab_size=64, hidden_size=32)).eval()


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(0))


# `Any`: in the typing of transformers only its own classes have `generate`.
def test_greedy_generation_is_the_argmax_loop(policy: Any) -> None:
    prompts = tokens(2, 7)
    expected = prompts
    with torch.no_grad():
        for _ in range(12):
            following = policy(expected).logits[:, -1].argmax(-1, keepdim=True)
            expected = torch.cat([expected, following], 1)
    for use_cache in (None, True, False):
        found = policy.generate(prompts, max_new_tokens=12, do_sample=False, use_cache=use_cache)
        assert found.tolist() == expected.tolist()


def test_generation_refuses_what_it_would_ignore(policy: Any) -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    with pytest.raises(ValueError, match="prompts of one length"):
        policy.generate(tokens(2, 4), attention_mask=mask, max_new_tokens=1)
    others: dict[str, Any] = {
        "state": DecodeState.empty(policy.config, 2),
        "cache": DynamicCache(),
        "cu_seqlens": torch.tensor([0, 4]),
    }
    for name, value in others.items():
        with pytest.raises(ValueError, match="not used by the model"):
            policy.generate(tokens(2, 4), max_new_tokens=1, **{name: value})


def test_the_last_logits_alone(policy: Policy) -> None:
    ids = tokens(2, 9)
    torch.testing.assert_close(policy(ids, logits_to_keep=2).logits, policy(ids).logits[:, -2:])


def test_padding_at_the_right_changes_nothing_and_is_never_counted(policy: Policy) -> None:
    lengths, ids = (9, 4), tokens(2, 9)
    mask = (torch.arange(9) < torch.tensor(lengths)[:, None]).long()
    packed = torch.cat([ids[0], ids[1, :4]])[None]
    edges = torch.tensor([0, 9, 13])
    labels = packed.clone()
    runs: list[tuple[dict[str, Any], torch.Tensor]] = [
        ({"cu_seqlens": edges, "labels": labels}, packed),
        # labels of padding are left out, whatever they say; its positions do not restart anything
        ({"attention_mask": mask, "labels": ids, "position_ids": torch.arange(9) * mask}, ids),
    ]
    outputs, counts = [], []
    for arguments, given in runs:
        with policy.routing_statistics():
            outputs.append(policy(given, **arguments))
        counts.append([c.clone() for c in policy.routing_counts()])
        policy.clear_routing_counts()
    expected, found = outputs
    torch.testing.assert_close(found.logits[mask.bool()], expected.logits[0])
    torch.testing.assert_close(found.loss, expected.loss)
    assert all(torch.equal(a, b) for a, b in zip(*counts, strict=True))
    last = policy(ids, attention_mask=mask, last_only=True).logits
    torch.testing.assert_close(last, expected.logits[0, [8, 12]])
    rows, targets = torch.tensor([9, 11]), ids[1, [1, 3]]  # of the flattened rows as given
    scored = policy(ids, attention_mask=mask, rows=rows, targets=targets).logprobs
    full = expected.logits[0, [9, 11]].log_softmax(-1)
    torch.testing.assert_close(scored, full.gather(1, targets[:, None])[:, 0])
    backbone = policy.model(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(backbone[mask.bool()], expected.last_hidden_state[0])


def test_restarting_positions_pack_whatever_number_comes_first(policy: Policy) -> None:
    ids = tokens(1, 6)
    expected = policy(ids, torch.tensor([0, 2, 6])).logits
    for first in ([0, 1], [7, 8]):
        positions = torch.tensor([[*first, 0, 1, 2, 3]])
        torch.testing.assert_close(policy(ids, position_ids=positions).logits, expected)


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"attention_mask": torch.tensor([[1, 1, 0, 1]] * 2)}, ValueError, "holes"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1]] * 2)}, ValueError, "left padding"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 0], [0] * 4])}, ValueError, "first token"),
        ({"attention_mask": torch.ones(2, 9)}, ValueError, r"attention_mask has shape \[2, 9\]"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1]] * 2)}, ValueError, "position_ids restart"),
        ({"past_key_values": DynamicCache()}, ValueError, "past_key_values"),
        ({"cache": DynamicCache()}, ValueError, "cache"),
        ({"output_hidden_states": True}, ValueError, "output_hidden_states"),
        ({"cu_seqlen": torch.tensor([0, 4])}, TypeError, "'cu_seqlen'"),
    ],
)
def test_wrong_inputs_are_named(
    policy: Policy, arguments: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        policy(tokens(2, 4), **arguments)
    with pytest.raises(error, match=named):
        policy.model(tokens(2, 4), **arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"rows": torch.tensor([1])}, "rows needs targets"),
        (
            {"targets": torch.zeros(4, dtype=torch.long), "labels": tokens(1, 4)},
            "targets and labels",
        ),
        ({"targets": torch.zeros(1, dtype=torch.long)}, r"targets has shape \[1\], expected \[4\]"),
        (
            {"rows": torch.tensor([1, 2]), "targets": torch.tensor([1])},
            r"targets has shape \[1\], expected \[2\]: one for each of rows",
        ),
        ({"labels": tokens(1, 3)}, r"labels has shape \[1, 3\]"),
        ({"cu_seqlens": torch.zeros(0, dtype=torch.long)}, r"cu_seqlens has shape \[0\]"),
        ({"cu_seqlens": torch.tensor([[0, 4]])}, r"cu_seqlens has shape \[1, 2\]"),
        ({"input_ids": torch.arange(4)}, r"input_ids has shape \[4\], expected \[B, L\]"),
    ],
)
def test_inputs_that_contradict_each_other_are_named(
    policy: Policy, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        policy(**({"input_ids": tokens(1, 4)} | arguments))


def test_the_loss_is_as_wide_as_the_policy() -> None:
    torch.manual_seed(0)
    wide = Policy(PolicyConfig.tiny(vocab_size=64, hidden_size=32)).double().eval()
    ids = tokens(1, 9)
    out = wide(ids, labels=ids)
    by_hand = -out.logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).mean()
    assert out.loss.dtype == torch.float64
    assert float((out.loss - by_hand).detach().abs()) < 1e-14


def test_a_state_cannot_skip_padding(policy: Policy) -> None:
    state = DecodeState.empty(policy.config, 2)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    with pytest.raises(ValueError, match="which a state does not allow"):
        policy(tokens(2, 4), state=state, attention_mask=mask)
    assert state.lengths.tolist() == [0, 0]
    with pytest.raises(ValueError, match="which cu_seqlens does not allow"):
        policy(tokens(1, 4), torch.tensor([0, 4]), attention_mask=mask[1:])
