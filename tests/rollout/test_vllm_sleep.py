"""An engine that gives its memory to the learner, with a package in miniature for vLLM."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from farhorizon.configs.errors import RunFailed
from farhorizon.policy.weights import WeightManifest
from farhorizon.rollout.engine_weights import EngineWeights
from farhorizon.rollout.requests import RequestGenerator
from farhorizon.rollout.sync import SyncError, WeightReceiver
from farhorizon.rollout.types import Completion, SamplingParams
from farhorizon.rollout.vllm import VllmEngine

from ..syncing import receive
from .fake_engine import BIAS, publish, state
from .fake_vllm import package
from .hash_engine import play

OLD, NEW = state(0), state(1)
PROMPT = np.array([3, 1, 4, 1, 5])
PARAMS = SamplingParams(temperature=1.0, max_tokens=6)


class Played:
    """An engine on the checkpoint of `OLD`, its generator, and what takes weights over."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, sleeps: bool = True) -> None:
        for name, module in package(OLD).items():
            monkeypatch.setitem(sys.modules, name, module)
        folder.mkdir(exist_ok=True)
        save_file(OLD, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"model_type": "miniature"}))
        self.engine = VllmEngine(folder, 32, dtype="float32", sleeps=sleeps)
        self.inside: Any = self.engine._engine
        self.generator = RequestGenerator(self.engine)
        holder = EngineWeights(self.engine, folder, WeightManifest.of(OLD), dict)
        self.receiver = WeightReceiver(holder)

    @property
    def calls(self) -> list[Any]:
        """What was said to vLLM about sleep since this was last asked."""
        said, self.inside.calls = self.inside.calls, []
        return said

    def completion(self) -> Completion:
        """Of a new sequence with the same prompt."""
        session = self.generator.open(PROMPT, [7], PARAMS)[0]
        return play(self.generator)[session]

    def update(self, number: int) -> None:
        with self.generator.updating(number):
            receive(self.receiver, publish(state(number), number))


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(tmp_path, monkeypatch)


def test_what_is_sampled_is_as_if_it_had_never_slept(
    played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are loaded and compared before caches have memory, scores and steps want all."""
    other = Played(tmp_path / "other", monkeypatch, sleeps=False)
    for number in range(3):
        if number:
            played.generator.sleep()
            assert played.calls == ["sleep"]
            tensors = played.engine._worker.get_model().state_dict().values()
            assert all(tensor.isnan().all() for tensor in tensors)
            played.update(number)
            other.update(number)
            assert played.calls == [["weights"], ["kv_cache"]]
        own, theirs = played.completion(), other.completion()
        assert own.token_ids.tolist() == theirs.token_ids.tolist()
        assert own.logprobs.tolist() == theirs.logprobs.tolist()
        assert own.versions.tolist() == [number] * 6
        assert played.calls == []
    assert other.calls == []


def test_what_runs_is_reported_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK"):
        monkeypatch.setenv(name, "0")
    Played(tmp_path, monkeypatch)
    assert os.environ["VLLM_NO_USAGE_STATS"] == os.environ["VLLM_DO_NOT_TRACK"] == "1"


def test_an_update_that_was_skipped_leaves_the_weights_of_before(played: Played) -> None:
    before = played.completion()
    played.generator.sleep()
    played.generator.sleep()
    assert played.calls == ["sleep"]
    after = played.completion()
    assert played.calls == [["weights", "kv_cache"]]
    assert after.token_ids.tolist() == before.token_ids.tolist()
    assert after.logprobs.tolist() == before.logprobs.tolist()


def test_no_state_of_before_is_found(played: Played) -> None:
    played.completion()
    played.completion()
    assert played.generator.counters.reused_tokens == len(PROMPT) - 1
    played.generator.sleep()
    played.completion()
    assert played.generator.counters.reused_tokens == len(PROMPT) - 1


def test_a_request_that_runs_goes_on_after_sleep(played: Played) -> None:
    """With its tokens, and spans that say which weights sampled each."""
    alone = played.completion()
    session = played.generator.open(PROMPT, [7], PARAMS)[0]
    played.generator.step()
    played.generator.step()
    played.generator.sleep()
    played.update(3)
    found = play(played.generator)[session]
    assert found.token_ids[:2].tolist() == alone.token_ids[:2].tolist()
    assert found.versions.tolist() == [0, 0, 3, 3, 3, 3]


def test_a_refused_update_serves_the_weights_of_before(played: Played) -> None:
    played.update(1)
    before = played.completion()
    played.generator.sleep()
    assert played.calls
    worker = played.engine._worker
    load = worker.reload_weights

    def lose(weights_iterator: Any) -> None:
        """A loader that leaves the threshold as it was."""
        worker.model.skipped = {"threshold"}
        load(weights_iterator)
        worker.reload_weights, worker.model.skipped = load, set()

    worker.reload_weights = lose
    with pytest.raises(SyncError, match=f"{BIAS}: "):
        played.update(2)
    assert played.calls == [["weights"]]  # no caches until something is computed
    after = played.completion()
    assert played.calls == [["kv_cache"]]
    assert after.logprobs.tolist() == before.logprobs.tolist()
    assert after.versions.tolist() == [1] * 6


def test_one_that_wakes_in_part_sleeps_again(played: Played) -> None:
    played.generator.sleep()
    with pytest.raises(RunFailed, match="unknown on this side"):
        played.engine.load(NEW | {"more": torch.zeros(1)})
    assert played.calls == ["sleep"]  # nothing was touched
    played.engine.load(NEW)
    played.generator.sleep()
    assert played.calls == [["weights"], "sleep"]
    assert played.engine.difference(NEW) is None
    assert played.calls == [["weights"]]


def test_no_room_to_wake_up_in_is_one_line(played: Played) -> None:
    played.generator.sleep()
    played.inside.room = False
    message = r"^vllm: no room to wake up in \(CUDA Error: out of memory.*\); lower rollout\.vllm\."
    with pytest.raises(RunFailed, match=message):
        played.engine.score(PROMPT, 1.0)
