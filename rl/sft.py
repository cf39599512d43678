"""Warm-up on demonstrations: TRL's SFTTrainer on token ids, with Quantile Balancing.

TRL gets ids and a mask, never text, so that a policy learns exactly the tokens that a rollout
would sample. Sequences are packed without padding. Gradient checkpointing stays off: recomputed
forwards would be counted as routing statistics a second time.
"""

from __future__ import annotations

import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging

from ..configs.errors import RunFailed
from ..configs.schema import SftConfig
from ..policy import Policy
from ..policy.corpus import Demonstration
from ..policy.memory import lack
from .collective import all_reduce
from .engine import join

DECAY = 0.3  # share of the steps, at the end, in which the learning rate falls to 0


@dataclass(frozen=True, slots=True)
class SftStep:
    """One optimizer step: tokens seen so far, mean loss per trained token in nats, gradient norm
    before clipping, share of trained tokens that were the most likely ones, and the largest
    max / mean expert load of any layer."""

    step: int
    tokens: int
    loss: float
    grad_norm: float
    accuracy: float
    expert_load: float


@dataclass(slots=True)
class QuantileBalancing(TrainerCallback):
    """Counts routing in the forwards of one optimizer step and solves at its end.

    Evaluation and whatever else runs between steps is outside of the counted block.
    """

    policy: Policy
    report: Callable[[SftStep], None]
    expert_load: float = 0.0
    _counting: ExitStack = field(default_factory=ExitStack)

    def on_step_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._counting.enter_context(self.policy.routing_statistics())

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._counting.close()
        all_reduce(self.policy.routing_counts())

    def on_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.expert_load = max(self.policy.update_thresholds(), default=1.0)

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs and "loss" in logs:
            self.report(
                SftStep(
                    state.global_step,
                    int(logs["num_tokens"]),
                    logs["loss"],
                    logs["grad_norm"],
                    logs["mean_token_accuracy"],
                    self.expert_load,
                )
            )


def join_processes(rank: int, ranks: int, rendezvous: str, gpu: bool) -> None:
    """Join the other ranks on this machine, in a way that TRL's trainer takes over."""
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # read, never used: a file is
    # Its own lock is a named semaphore, which a process that is killed leaves behind.
    logging.tqdm.set_lock(threading.RLock())
    if gpu:
        torch.cuda.set_device(rank)
    join(rank, ranks, rendezvous, "cuda" if gpu else "cpu", local_rank=rank)


def train_on_demonstrations(
    policy: Policy,
    tokenizer: PreTrainedTokenizerFast,
    demonstrations: Sequence[Demonstration],
    config: SftConfig,
    report: Callable[[SftStep], None],
) -> int:
    """``config.steps`` optimizer steps in place; returns the tokens seen, prompts included.

    The loss is the mean over assistant tokens of a step. Demonstrations are repeated in another
    order when they are used up.
    """
    data = _dataset(demonstrations)
    identity = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    identity |= {name: getattr(policy.config, name) for name in identity}
    with tempfile.TemporaryDirectory() as scratch:  # nothing is written, yet TRL wants a place
        try:
            trainer = _trainer(policy, tokenizer, data, config, report, scratch)
            trainer.train()
        except torch.OutOfMemoryError as error:
            text = f"sft: {lack(error, policy)}; lower batch_tokens, or raise ranks"
            raise RunFailed(text) from None
    # TRL replaces the forward and aligns the stop token with the tokenizer's document end.
    policy.__dict__.pop("forward", None)
    for name, value in identity.items():
        setattr(policy.config, name, value)
    _check_outcome(policy, demonstrations[0])
    return int(trainer.state.num_input_tokens_seen)


def _dataset(demonstrations: Sequence[Demonstration]) -> Any:
    import datasets

    datasets.disable_progress_bars()
    return datasets.Dataset.from_dict(
        {
            "input_ids": [d.token_ids for d in demonstrations],
            "assistant_masks": [d.assistant_mask.astype(np.int8) for d in demonstrations],
        }
    )


def _check_gradient(policy: Policy, step: int) -> None:
    for name, parameter in policy.named_parameters():
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            raise RunFailed(f"sft step {step}: the gradient of {name} is not finite; lower lr")


@torch.no_grad()
def _check_outcome(policy: Policy, demonstration: Demonstration) -> None:
    """The last step has no next one whose gradient would tell."""
    ids = torch.as_tensor(demonstration.token_ids, dtype=torch.int64)
    logits = policy(ids[None].to(next(policy.parameters()).device), last_only=True).logits
    if not bool(logits.isfinite().all()):
        raise RunFailed("sft: the policy of the last step is not finite; lower lr")


def _trainer(
    policy: Policy,
    tokenizer: PreTrainedTokenizerFast,
    data: Any,
    config: SftConfig,
    report: Callable[[SftStep], None],
    scratch: str,
) -> Any:
    gpu = config.gpus > 0
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if gpu else "cpu")  # else it warns
    logging.set_verbosity_error()
    with warnings.catch_warnings():
        # gradient_checkpointing is on unless it is switched off by its deprecated name.
        warnings.simplefilter("ignore", FutureWarning)
        from trl.trainer.sft_config import SFTConfig
        from trl.trainer.sft_trainer import SFTTrainer

        arguments = SFTConfig(
            output_dir=scratch,
            max_steps=config.steps,
            seed=config.seed,
            per_device_train_batch_size=1,
            max_length=config.batch_tokens // config.ranks,
            packing=True,
            assistant_only_loss=False,
            gradient_checkpointing=False,
            learning_rate=config.lr,
            warmup_steps=config.warmup_steps,
            lr_scheduler_type="warmup_stable_decay",
            lr_scheduler_kwargs={"num_decay_steps": round(DECAY * config.steps)},
            max_grad_norm=config.grad_clip,
            weight_decay=0.0,
            adam_beta2=0.95,
            optim="adamw_torch_fused",
            bf16=config.dtype == "bfloat16",
            use_cpu=not gpu,
            include_num_input_tokens_seen="all",
            logging_steps=1,
            disable_tqdm=True,
            report_to="none",
            save_strategy="no",
            dataloader_pin_memory=gpu,
            # the first attention site reads the bare embedding, its depth query is never used
            ddp_find_unused_parameters=config.ranks > 1,
        )
        # One process drives one GPU: DataParallel would take all that it sees.
        arguments._n_gpu = min(arguments.n_gpu, 1)

        class Trainer(SFTTrainer):
            """Looks at the gradient as backward leaves it: clipping spreads a nan over all of it,
            and callbacks come after that."""

            def training_step(self, *args: Any, **kwargs: Any) -> Any:
                loss = super().training_step(*args, **kwargs)
                _check_gradient(policy, self.state.global_step + 1)
                return loss

        trainer = Trainer(
            model=policy,
            processing_class=tokenizer,
            train_dataset=data,
            args=arguments,
            callbacks=[QuantileBalancing(policy, report)],
        )
    trainer.remove_callback(PrinterCallback)
    return trainer
