"""vLLM behind the generator: its answers by hand, and the real engine where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from farhorizon.configs.errors import RunFailed
from farhorizon.rollout.types import FinishReason
from farhorizon.rollout.vllm import read_answer

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"  # made by launch/vllm-env.sh


def output(**changes: object) -> SimpleNamespace:
    """What vLLM gives of a finished request."""
    completion = {
        "token_ids": [7, 8],
        "logprobs": [{7: SimpleNamespace(logprob=-1.0)}, {8: SimpleNamespace(logprob=-2.0)}],
        "finish_reason": "stop",
        "weight_versions": [
            SimpleNamespace(version="4", start=0, end=1),
            SimpleNamespace(version="5", start=1, end=2),
        ],
    }
    one = SimpleNamespace(**completion | changes)
    return SimpleNamespace(request_id="12", outputs=[one], num_cached_tokens=16)


def test_an_answer_is_read() -> None:
    found = read_answer(output())
    assert (found.session, found.cached, found.finish) == (12, 16, FinishReason.STOP)
    assert found.token_ids.tolist() == [7, 8] and found.token_ids.dtype == np.int32
    assert found.logprobs.tolist() == [-1, -2] and found.logprobs.dtype == np.float32
    assert found.versions.tolist() == [4, 5]


def test_an_answer_that_is_not_whole_is_refused() -> None:
    with pytest.raises(RunFailed, match="a request ended with abort"):
        read_answer(output(finish_reason="abort"))
    spans = [SimpleNamespace(version="4", start=1, end=2)]
    with pytest.raises(RunFailed, match="the weight version of some tokens"):
        read_answer(output(weight_versions=spans))


def run(worker: str, folder: Path) -> dict[str, Any]:
    """What a script finds that runs in the environment of vLLM."""
    done = subprocess.run(
        [PYTHON, Path(__file__).with_name(worker), folder],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_routes_of_layers_with_experts_are_packed() -> None:
    """vLLM has rows of all layers, wider ones above 256 experts."""
    rows = np.arange(2 * 3 * 2).reshape(2, 3, 2)
    few = read_answer(output(routed_experts=rows.astype(np.uint8)), [1, 2]).routes
    assert few is not None and few.dtype == np.uint8 and few.tolist() == rows[:, 1:].tolist()
    many = read_answer(output(routed_experts=rows.astype(np.uint16)), [0, 2]).routes
    assert many is not None and many.dtype == np.int16 and many.tolist() == rows[:, [0, 2]].tolist()
    assert read_answer(output(routed_experts=rows), []).routes is None


def test_an_answer_without_routes_is_refused() -> None:
    with pytest.raises(RunFailed, match="routes of 3 layers wanted, got none"):
        read_answer(output(routed_experts=None), [1, 2])
    with pytest.raises(RunFailed, match="routes of 4 layers wanted, got those of 3"):
        read_answer(output(routed_experts=np.zeros((2, 3, 2), np.uint8)), [3])


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-vllm: bash launch/vllm-env.sh")
def test_the_real_engine_on_a_policy_of_ours(tmp_path: Path) -> None:
    """KDA and latent attention in vLLM's hybrid cache, and a change of weights in flight."""
    out = run("vllm_policy_worker.py", tmp_path)
    for name in ("error", "short_error", "turn_error", "score_error", "new_error", "renewed_error"):
        assert out[name] < 1e-4, name
    assert len({tuple(tokens) for tokens in out["group"]}) == 3
    assert out["alone"] == out["group"][1]  # company changes no sample
    assert out["versions"] == [0] * 5 + [1] * 7
    assert out["difference"] is None and out["whole"] is None
    threshold = "model.layers.1.block_sparse_moe.gate.e_score_correction_bias"
    assert out["stale"] == f"{threshold}: what is served is not what the weights give"
    assert out["narrow"] == f"{threshold}: served in bfloat16, which rounds it"
    assert out["swapped"].startswith("model.layers.0.self_attn.q_proj.weight: what is served is")
    assert out["dropped"] == f"weight sync refused: {threshold}: missing on the other side"
    assert out["kept_error"] < 1e-4


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-vllm: bash launch/vllm-env.sh")
def test_the_real_engine_on_a_dense_policy(tmp_path: Path) -> None:
    """Sampling, prefixes, stops and a change of weights in flight, on the CPU in fp32."""
    out = run("vllm_worker.py", tmp_path)
    for name in ("error", "turn_error", "greedy_error", "new_error", "renewed_error"):
        assert out[name] < 1e-4, name
    assert len({tuple(tokens) for tokens in out["group"]}) == 3
    assert out["alone"] == out["group"][1]  # company changes no sample
    assert out["turn"] != out["group"][0]
    assert out["reused"] == 2 * 256  # of 300 tokens, in whole blocks of 128
    assert (out["stopped"], out["finish"]) == (out["group"][0][:4], "stop")
    assert out["versions"] == [0] * 5 + [1] * 7
    name = "weight sync of version 1 refused: model.layers.0.self_attn.k_proj.weight"
    assert out["lost"] == f"{name}: missing on the other side"
    assert out["rounded"] == f"{name}: float32 [64, 64] here, bfloat16 [64, 64] there"
    norm = "model.layers.0.input_layernorm.weight: what is served is not what the weights give"
    assert out["swapped"] == f"weight sync of version 1 refused: {norm} (and 1 more)"
    assert out["unloaded"].startswith("weight sync of version 1 refused: model.norm.weight: ")
    assert "log-prob off by" in out["mixed"] and "canary token" in out["mixed"]
    assert out["failed"] == "vllm: loading weights failed with OSError: torn"
    assert out["kept"]  # after each of them the old weights are served
    assert out["version"] == 1
    assert out["stale"] == 7
    assert out["queued"] == [[1] * 12] * 2  # none of before, though queued before
    assert out["queued_error"] < 1e-4
    assert out["found_of_new"] == 256  # by the second of the queued ones, of the first
    assert out["renewed"] == 50 + 11
    assert out["after_clear"]
    assert out["too_long"] == "context=512: a sequence of 300 tokens with 300 to sample is longer"
    assert out["no_memory"].startswith("vllm does not start on ")
    sizes = "rollout.vllm.memory=0.001, rollout.concurrency=8 and context=512 are its needs"
    assert sizes in out["no_memory"]
