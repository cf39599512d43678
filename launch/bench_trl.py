"""TRL's side of ``farhorizon bench grpo``, a process of its own: ``python -m ... JOB RESULT``.

`GRPOTrainer` on the Kimi-Linear policy that transformers ships, with TRL's own settings but for
the task, fp32, and every completion having the same length. There is no reference model (TRL's
default, and nothing that the other side has).
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    KimiLinearConfig,
    KimiLinearForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from ..policy.tokenizer import END_OF_DOCUMENT, control_id, load_tokenizer
from . import bench_task as task


@dataclass(slots=True)
class Clock(TrainerCallback):
    """When each step was over, and how long its completions were."""

    ends: list[float]
    lengths: list[float]

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.ends.append(time.perf_counter())

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs and "completions/mean_length" in logs:
            self.lengths.append(logs["completions/mean_length"])


def measure(job: dict[str, Any]) -> task.Measurement:
    """Time ``job["steps"]`` steps after one of warm-up; RuntimeError if a length is wrong."""
    tokenizer = load_tokenizer(job["tokenizer"])
    tokenizer.padding_side = "left"
    policy = _policy(tokenizer, job["context"])
    clock = Clock([], [])
    length = job["completion_tokens"]
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=_rewards,
        train_dataset=Dataset.from_dict({"prompt": [task.prompt(task.PROMPT_TOKENS)] * 64}),
        processing_class=tokenizer,
        callbacks=[clock],
        args=GRPOConfig(
            output_dir=job["scratch"],
            per_device_train_batch_size=task.COMPLETIONS,
            gradient_accumulation_steps=1,
            num_generations=task.GROUP_SIZE,
            max_completion_length=length,
            generation_kwargs={"min_new_tokens": length},
            max_steps=job["steps"] + 1,
            learning_rate=job["lr"],
            temperature=job["temperature"],
            beta=0.0,
            gradient_checkpointing=job["checkpointing"],
            use_cpu=job["cpu"],
            bf16=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
    )
    trainer.train()
    if set(clock.lengths) != {float(length)} or len(clock.ends) != job["steps"] + 1:
        raise RuntimeError(f"expected completions of {length} tokens, got {clock.lengths}")
    return task.Measurement(
        tuple(end - start for start, end in zip(clock.ends, clock.ends[1:], strict=False)),
        task.COMPLETIONS * length,
        sum(tensor.numel() for tensor in policy.state_dict().values()),
        {},
    )


def _rewards(completions: list[str], **kwargs: Any) -> list[float | None]:
    return [task.reward(text) for text in completions]


def _policy(tokenizer: PreTrainedTokenizerFast, context: int) -> KimiLinearForCausalLM:
    torch.manual_seed(0)
    return KimiLinearForCausalLM(
        KimiLinearConfig(
            vocab_size=task.VOCABULARY,
            hidden_size=task.HIDDEN,
            intermediate_size=task.DENSE_HIDDEN,
            moe_intermediate_size=task.EXPERT_HIDDEN,
            num_hidden_layers=task.LAYERS,
            num_attention_heads=task.HEADS,
            num_key_value_heads=task.HEADS,
            kv_lora_rank=32,
            qk_rope_head_dim=16,
            qk_nope_head_dim=task.HEAD_DIM,
            v_head_dim=task.HEAD_DIM,
            linear_head_dim=task.HEAD_DIM,
            linear_num_heads=task.HEADS,
            num_local_experts=task.EXPERTS,
            num_experts_per_tok=task.ACTIVE_EXPERTS,
            n_shared_experts=1,
            layer_types=["linear_attention"] * (task.LAYERS - 1) + ["full_attention"],
            mlp_layer_types=["dense"] + ["sparse"] * (task.LAYERS - 1),
            pad_token_id=control_id(tokenizer, "[PAD]"),
            bos_token_id=control_id(tokenizer, "[BOS]"),
            eos_token_id=control_id(tokenizer, END_OF_DOCUMENT),
            max_position_embeddings=context,
        )
    )


if __name__ == "__main__":
    result = measure(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(asdict(result)), encoding="utf-8")
