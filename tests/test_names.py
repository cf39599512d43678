"""The names that users and other tools rely on, with the arguments that they pass by keyword."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from typing import Any

import pytest

KDA = (
    "q k v g beta A_log dt_bias scale initial_state output_final_state use_qk_l2norm_in_kernel "
    "use_gate_in_kernel use_beta_sigmoid_in_kernel lower_bound cu_seqlens"
)
LOSS = "logprobs behavior_logprobs advantages mask sequence_ids denominator"
STABLE = {
    "kernels.kda.kda_gate": "z A_log dt_bias lower_bound",
    "kernels.kda.chunk_kda": KDA,
    "kernels.kda.recurrent_kda": KDA,
    "kernels.kda.naive_kda": KDA,
    "kernels.moe.route": "scores bias k",
    "kernels.moe.QuantileHistogram": "bias k",
    "kernels.moe.QuantileHistogram.add": "scores valid",
    "kernels.moe.QuantileHistogram.merge": "other",
    "kernels.moe.QuantileHistogram.solve": "",
    "kernels.attnres.mix": "sources query norm_weight eps",
    "kernels.logprob.token_logprobs": "hidden lm_head targets temperature",
    "policy.PolicyConfig.from_dict": "",
    "policy.PolicyConfig.to_dict": "",
    "policy.PolicyConfig.from_pretrained": "",
    "policy.Policy": "config",
    "policy.Policy.forward": "input_ids cu_seqlens state cu_seq_lens_q position_ids attention_mask",
    "policy.Policy.generate": "",
    "policy.Policy.from_pretrained": "",
    "policy.Policy.save_pretrained": "",
    "policy.DecodeState": "",
    "policy.load_tokenizer": "folder",
    "rl.advantages.group_relative": "rewards group_ids scale baseline",
    "rl.advantages.gae": "rewards values terminated truncated bootstrap gamma lam",
    **{
        f"rl.losses.{name}": LOSS
        for name in (
            *("ppo_clip", "grpo", "dr_grpo", "dapo", "gspo"),
            *("cispo", "rloo", "reinforce_pp", "k25"),
        )
    },
    "envs.register": "id factory",
    "envs.make": "id",
    "envs.check_env": "env",
    "envs.MessageEnv": "",
    "envs.ToolEnv": "",
}


@pytest.mark.parametrize("path", STABLE)
def test_stable_names_take_their_arguments(path: str) -> None:
    parts = path.split(".")
    # kernels and rl are imported per module, the rest per folder
    depth = 2 if parts[0] in ("kernels", "rl") else 1
    found: Any = importlib.import_module(".".join(("farhorizon", *parts[:depth])))
    for name in parts[depth:]:
        found = getattr(found, name)
    parameters = inspect.signature(found).parameters
    missing = [name for name in STABLE[path].split() if name not in parameters]
    assert missing == []


@pytest.mark.parametrize("first", ["policy", "envs"])
def test_a_folder_may_be_imported_first_and_starts_no_engine(first: str) -> None:
    code = (
        f"import sys, farhorizon.{first}\n"
        "print({'ray', 'deepspeed', 'trl', 'datasets', 'vllm', 'matplotlib'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
