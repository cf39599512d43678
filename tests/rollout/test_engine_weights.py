"""Weights of an engine with a layout of its own: proven, or those of before are served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from farhorizon.configs.errors import RunFailed, UserError
from farhorizon.policy.checkpoint import load_checkpoint
from farhorizon.policy.records import read_config
from farhorizon.policy.weights import Publication, WeightManifest
from farhorizon.rollout.engine_weights import EngineWeights, policy_weights, read_stored
from farhorizon.rollout.requests import RequestGenerator
from farhorizon.rollout.sync import SyncError, WeightReceiver
from farhorizon.rollout.types import SamplingParams

from ..syncing import TRANSPORTS, receive
from .fake_engine import BIAS, WIDTH, FakeEngine, logprobs, publish, state
from .test_requests import PROMPT, HashEngine, play

OLD, NEW = state(0), state(1)


def make(folder: Path) -> tuple[FakeEngine, WeightReceiver]:
    """An engine that serves the checkpoint of `OLD`, and its receiver."""
    save_file(OLD, folder / "model.safetensors")
    engine = FakeEngine(OLD)
    return engine, WeightReceiver(EngineWeights(engine, folder, WeightManifest.of(OLD), dict))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_are_taken_over_and_proven(tmp_path: Path, transport: str) -> None:
    engine, receiver = make(tmp_path)
    for number in (1, 2, 3):
        weights = state(number)
        receive(receiver, publish(weights, number), transport)
        assert receiver.version is not None and receiver.version.number == number
        served = engine.model.served()
        assert all(torch.equal(served[name], weights[name]) for name in weights)
        assert engine.difference(weights) is None


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("threshold", f"{BIAS}: served, but no weight was loaded into it"),
        ("rounded", f"{BIAS}: served in bfloat16, which rounds it"),
        ("derived", "turned: served, but no weight was loaded into it"),
        ("stale", "turned: what is served is not what the weights give"),
        ("swapped", "fused: what is served is not what the weights give"),
        ("broken", "ran out of memory"),
    ],
)
@pytest.mark.parametrize("earlier", [0, 1])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_not_served_right_is_named_and_taken_back(
    tmp_path: Path, transport: str, fault: str, named: str, earlier: int
) -> None:
    engine, receiver = make(tmp_path)
    if earlier:
        receive(receiver, publish(state(7), 1), transport)
    before = engine.model.served()
    engine.fault = fault
    with pytest.raises(RunFailed, match=named):
        receive(receiver, publish(NEW, 5), transport)
    served = engine.model.served()
    assert all(torch.equal(served[name], before[name]) for name in before)
    assert (0 if receiver.version is None else receiver.version.number) == earlier
    receive(receiver, publish(NEW, 6), transport)
    assert torch.equal(engine.model.served()[BIAS], NEW[BIAS])


def lose_bucket(p: Publication) -> Publication:
    return replace(p, buckets=p.buckets[1:])


def swap_buckets(p: Publication) -> Publication:
    i, j = (p.manifest.names.index(f"{name}_proj.weight") for name in "qk")
    buckets = list(p.buckets)
    buckets[i] = replace(p.buckets[j], first=i)
    buckets[j] = replace(p.buckets[i], first=j)
    return replace(p, buckets=tuple(buckets))


def shift_canary(p: Publication) -> Publication:
    return replace(p, canary_logprobs=p.canary_logprobs + np.float32(2e-4))


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (lose_bucket, "embed.weight: no bucket held it"),
        (swap_buckets, "k_proj.weight: its bytes are not those published"),
        (shift_canary, r"canary token \d+: log-prob off by .* more than 1\.00e-04"),
    ],
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_faulty_publication_leaves_the_engine_as_it_was(
    tmp_path: Path, transport: str, fault: Callable[[Publication], Publication], named: str
) -> None:
    engine, receiver = make(tmp_path)
    with pytest.raises(SyncError, match=named):
        receive(receiver, fault(publish(NEW, 5)), transport)
    served = engine.model.served()
    assert all(torch.equal(served[name], OLD[name]) for name in OLD)


def test_an_update_that_begins_in_another_is_no_mixture(tmp_path: Path) -> None:
    engine, receiver = make(tmp_path)
    first, second = publish(NEW, 1), publish(state(2), 2)
    receiver.begin(first.announced)
    receiver.load(first.buckets[0])
    receiver.begin(second.announced)
    for bucket in (*second.buckets[1:], first.buckets[0]):
        receiver.load(bucket)
    with pytest.raises(SyncError, match=r"version 2 refused: embed\.weight: its bytes"):
        receiver.verify(second)
    with pytest.raises(SyncError, match="no publication has been accepted"):
        receiver.commit()
    assert torch.equal(engine.model.served()["embed.weight"], OLD["embed.weight"])


def test_an_engine_that_cannot_go_back_says_so(tmp_path: Path) -> None:
    engine, receiver = make(tmp_path)

    class Stuck(EngineWeights):
        def difference(self, publication: Publication) -> str | None:
            engine.fault = "stale"  # in the load that is to bring the old ones back
            return "turned: stale"

    receiver = WeightReceiver(Stuck(engine, tmp_path, WeightManifest.of(OLD), dict))
    with pytest.raises(RunFailed, match=r"not served again \(turned: what is served is not"):
        receive(receiver, publish(NEW, 1))


def test_a_refused_update_changes_no_request(tmp_path: Path) -> None:
    """Running and queued ones go on with the version and the salt that they have."""
    engine, receiver = make(tmp_path)
    requests = HashEngine()
    generator = RequestGenerator(requests)
    running = generator.open(PROMPT, [7], SamplingParams(max_tokens=6))[0]
    generator.step()
    queued = generator.open(PROMPT[:4], [8], SamplingParams(max_tokens=6))[0]
    for fault, number in (("stale", 1), ("", 2)):
        engine.fault = fault
        with generator.exclusive():
            try:
                receive(receiver, publish(NEW, number))
                generator.version = number
            except SyncError:
                assert generator.version == 0
        generator.step()
    found = play(generator)
    assert found[running].versions.tolist() == [0, 0, 2, 2, 2, 2]
    assert found[queued].versions.tolist() == [0, 2, 2, 2, 2, 2]
    assert [r.salt for r in requests.requests] == ["0", "0"]


def test_padding_does_not_count(tmp_path: Path) -> None:
    """What no weight fills is zero after a load, whatever was in the memory."""
    engine, receiver = make(tmp_path)
    with torch.no_grad():
        engine.model.fused[3 * WIDTH :] = torch.nan
    receive(receiver, publish(NEW, 1))
    assert not engine.model.fused[3 * WIDTH :].any()
    with torch.no_grad():
        engine.model.fused[3 * WIDTH :] = -0.0
    assert engine.difference(NEW) == "fused: what is served is not what the weights give"


def test_fake_and_formula_agree() -> None:
    assert np.allclose(FakeEngine(OLD).score(PROMPT, 0.7), logprobs(OLD, 0.7), atol=1e-5)


def test_tensors_of_a_policy_get_the_names_of_its_files(tiny_checkpoint: Path) -> None:
    """Experts one by one, from a manifest that is made without reading weights."""
    taken: list[dict[str, torch.Tensor]] = []

    class Listening(FakeEngine):
        def load(self, weights: object) -> None:
            assert isinstance(weights, dict)
            taken.append(weights)

    holder = policy_weights(Listening(OLD), tiny_checkpoint, read_config(tiny_checkpoint))
    policy = load_checkpoint(tiny_checkpoint).policy
    assert holder.manifest == WeightManifest.of(policy.state_dict())
    holder.prepare(policy.state_dict())
    with holder.serving(policy.state_dict()):
        pass
    stored = read_stored(tiny_checkpoint)
    assert taken[0].keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(taken[0][name].to(tensor.dtype), tensor), name


def test_a_policy_beside_a_vision_tower_is_refused(seeing_checkpoint: Path) -> None:
    config = read_config(seeing_checkpoint)
    with pytest.raises(UserError, match=r"has a vision tower, which rollout\.engine=vllm does not"):
        policy_weights(FakeEngine(OLD), seeing_checkpoint, config)
