"""What both sides of ``farhorizon bench grpo`` do: one prompt, a letter to count, one size."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from ..envs.base import MessageEnv, Observation, Step
from ..envs.types import Message
from ..policy import Policy, PolicyConfig
from ..policy.checkpoint import save_checkpoint
from ..policy.records import StageRecord
from ..policy.tokenizer import END_OF_MESSAGE, ROLES, SPECIAL_TOKENS, control_id, load_tokenizer

PROMPT_TOKENS = 81
VOCABULARY = 128
GROUPS, GROUP_SIZE = 4, 8
COMPLETIONS = GROUPS * GROUP_SIZE
# Sizes that both policies share.
HIDDEN, LAYERS, HEADS, HEAD_DIM = 128, 4, 4, 32
EXPERTS, ACTIVE_EXPERTS, EXPERT_HIDDEN, DENSE_HIDDEN = 8, 2, 64, 256


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of one side.

    ``seconds`` per step, warm-up excluded; ``tokens`` sampled in one of these steps; ``weights``
    are the numbers in parameters and persistent buffers; ``parts`` the mean seconds of the phases
    of a step, where known.
    """

    seconds: tuple[float, ...]
    tokens: int
    weights: int
    parts: dict[str, float]

    @property
    def completions_per_second(self) -> float:
        """Completions that were sampled and learned from, per second of all timed steps."""
        return COMPLETIONS * len(self.seconds) / sum(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens per second of all timed steps."""
        return self.tokens * len(self.seconds) / sum(self.seconds)


class CountLetters(MessageEnv):
    """One turn: the reward is the number of letters ``a`` in the answer, over 10."""

    def __init__(self, prompt: str) -> None:
        self.prompt = prompt

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        return (Message("user", self.prompt),), {}

    def step(self, action: str) -> Step:
        return self.finish(reward(action))


def reward(text: str) -> float:
    """What an answer earns on both sides."""
    return text.count("a") / 10


def prompt(tokens: int) -> str:
    """An instruction of so many characters, which are as many tokens."""
    return ("count the a letters: " + "xyz" * tokens)[:tokens]


def write_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A tokenizer of `VOCABULARY` tokens: printable ASCII one by one, role names, control tokens.

    `train_tokenizer` keeps all 256 bytes and has no vocabulary this small.
    """
    plain = [chr(code) for code in range(32, 127)] + list(ROLES)
    reserved = VOCABULARY - len(plain) - len(SPECIAL_TOKENS)
    special = [f"<|reserved_{i}|>" for i in range(reserved)] + [*SPECIAL_TOKENS]
    vocabulary = {token: index for index, token in enumerate([*plain, *special])}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = {
        "version": "1.0",
        "added_tokens": [
            {"id": vocabulary[token], "content": token, **flags, "special": True}
            for token in special
        ],
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "BPE",
            "unk_token": "[UNK]",
            "fuse_unk": False,
            "ignore_merges": True,
            "vocab": vocabulary,
            "merges": [],
        },
    }
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return load_tokenizer(folder)


def write_policy(folder: Path, tokenizer: PreTrainedTokenizerFast, context: int) -> None:
    """A checkpoint of an untrained policy that never ends its answer.

    Untrained policies stop at random, and differently on the two sides. Here all embeddings share
    a direction, and the stop token's output row points against it: its probability is below e^-20.
    """
    torch.manual_seed(0)
    config = PolicyConfig.tiny(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=DENSE_HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_experts=EXPERTS,
        num_experts_per_token=ACTIVE_EXPERTS,
        moe_intermediate_size=EXPERT_HIDDEN,
        routed_expert_hidden_size=HIDDEN,
        v_head_dim=HEAD_DIM,
        qk_nope_head_dim=HEAD_DIM,
        max_position_embeddings=context,
        initializer_range=0.02,
        linear_attn_config={
            "num_heads": HEADS,
            "head_dim": HEAD_DIM,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
            "kda_layers": list(range(1, LAYERS)),
            "full_attn_layers": [LAYERS],
        },
    )
    policy = Policy(config)
    with torch.no_grad():
        policy.model.embed_tokens.weight[:, 0] = 1.0
        stop = policy.lm_head.weight[control_id(tokenizer, END_OF_MESSAGE)]
        stop.zero_()
        stop[0] = -3.0
    save_checkpoint(folder, policy, config, tokenizer, StageRecord(context, (context,), 0, ""))
