"""The settings of DeepSpeed that follow from the learner's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..configs.schema import LearnerConfig
from .optimizer import is_vector

BUCKET_ELEMENTS = 50_000_000  # gradients reduced at once


def deepspeed_config(
    parameters: Mapping[str, nn.Parameter], config: LearnerConfig
) -> dict[str, Any]:
    """What DeepSpeed is initialized with."""
    vectors = [p.numel() for p in parameters.values() if is_vector(p)]
    total = sum(p.numel() for p in parameters.values())
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": config.optimizer == "muon",  # ours
        "gradient_clipping": config.grad_clip if config.zero_stage else 0.0,
        "steps_per_print": None,
        "zero_optimization": {
            "stage": config.zero_stage,
            "reduce_bucket_size": min(total, BUCKET_ELEMENTS),
            "allgather_bucket_size": 2 * BUCKET_ELEMENTS,
            # Norms, gates and depth-mixture queries are read outside of their own modules' forward;
            # they are small, and stay whole.
            "stage3_param_persistence_threshold": max(vectors, default=0) + 1,
        },
        "torch_autocast": {
            "enabled": config.dtype == "bfloat16",
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],  # the modules whose gradients would be rounded
        },
    }
