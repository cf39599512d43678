"""Weight updates that are wrong in one place: refused by name, with the old weights untouched."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from farhorizon.policy import Policy, PolicyConfig
from farhorizon.policy.weights import Publication, TensorSpec, WeightManifest, digest
from farhorizon.rollout.sync import PolicyWeights, SyncError, WeightReceiver

from ..fakes import publish
from ..syncing import TRANSPORTS, bytes_of, place_of, receive

CONFIG = PolicyConfig.tiny(vocab_size=24, hidden_size=32, num_hidden_layers=4)
QUERY = "model.layers.0.mlp_res_proj.weight"
THRESHOLD = "model.layers.1.block_sparse_moe.gate.e_score_correction_bias"
# One of each kind that other systems are known to lose.
KINDS = [
    THRESHOLD,
    QUERY,
    "model.layers.1.self_attn.A_log",
    "model.layers.1.self_attn.dt_bias",
    "model.layers.1.self_attn.q_conv1d.weight",
    "lm_head.weight",
]


def make(seed: int) -> Policy:
    torch.manual_seed(seed)
    policy = Policy(CONFIG)
    with torch.no_grad():
        for tensor in policy.state_dict().values():
            tensor.add_(torch.randn_like(tensor) * 0.05)
    return policy


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_everything_arrives_bit_for_bit(transport: str) -> None:
    """C11: parameters and persistent buffers, each changed by a constant of its own."""
    learner, rollout = make(0), make(0)
    state = learner.state_dict()
    with torch.no_grad():
        for number, tensor in enumerate(state.values()):
            tensor.add_(1e-3 * (number + 1))
    publication = publish(learner, 3)
    assert set(publication.manifest.names) == set(rollout.state_dict()) >= set(KINDS)
    addresses = {name: tensor.data_ptr() for name, tensor in rollout.state_dict().items()}
    receiver = WeightReceiver(PolicyWeights(rollout))
    receive(receiver, publication, transport)
    for name, tensor in rollout.state_dict().items():
        assert digest(tensor) == digest(state[name]), name
        assert tensor.data_ptr() == addresses[name], name
    assert receiver.version == publication.version


def test_thresholds_that_arrive_change_the_routing() -> None:
    """C06 and C11: the router follows the synced bias, added to the scores."""
    learner, rollout = make(0), make(0)
    bias = learner.get_buffer(THRESHOLD)
    bias.copy_(torch.tensor([-9.0, 9, -9, 9, -9, -9, -9, -9]))
    receive(WeightReceiver(PolicyWeights(rollout)), publish(learner, 1))
    with rollout.routing_statistics():
        rollout(torch.arange(10)[None])
    load = rollout.update_thresholds()[0]
    assert load == pytest.approx(8 / 2)  # all tokens on two of eight experts


def drop_from_manifest(p: Publication) -> Publication:
    keep = [i for i, name in enumerate(p.manifest.names) if name != THRESHOLD]
    return replace(
        p,
        manifest=WeightManifest(tuple(p.manifest.specs[i] for i in keep)),
        digests=tuple(p.digests[i] for i in keep),
    )


def add_to_manifest(p: Publication) -> Publication:
    extra = TensorSpec("model.extra.weight", (2,), "float32")
    return replace(
        p, manifest=WeightManifest((*p.manifest.specs, extra)), digests=(*p.digests, "0" * 32)
    )


def change_spec(**change: object) -> Callable[[Publication], Publication]:
    def apply(p: Publication) -> Publication:
        specs = tuple(
            replace(s, **change) if s.name == QUERY else s  # type: ignore[arg-type]
            for s in p.manifest.specs
        )
        return replace(p, manifest=WeightManifest(specs))

    return apply


def lose_bucket(p: Publication) -> Publication:
    bucket, _ = place_of(p, QUERY)
    return replace(p, buckets=tuple(b for b in p.buckets if b is not bucket))


def flip_byte(p: Publication) -> Publication:
    bytes_of(p, QUERY)[5] ^= 1
    return p


def negate(p: Publication) -> Publication:
    """What adds up to the same in many a checksum."""
    bytes_of(p, THRESHOLD).view(torch.float32).neg_()
    return p


def round_threshold(p: Publication) -> Publication:
    sent = bytes_of(p, THRESHOLD).view(torch.float32)
    sent.copy_(sent.bfloat16())
    return p


def drop_threshold(p: Publication) -> Publication:
    bytes_of(p, THRESHOLD).zero_()
    return p


def swap_tensors(p: Publication) -> Publication:
    one, other = (bytes_of(p, name) for name in (QUERY, "model.layers.1.mlp_res_proj.weight"))
    first = one.clone()
    one.copy_(other)
    other.copy_(first)
    return p


def keep_stale(p: Publication) -> Publication:
    bytes_of(p, QUERY).copy_(bytes_of(publish(make(0), 0), QUERY))
    return p


def cut_bucket(p: Publication) -> Publication:
    bucket, _ = place_of(p, p.manifest.names[0])
    short = replace(bucket, payload=bucket.payload[:-4])
    return replace(p, buckets=tuple(short if b is bucket else b for b in p.buckets))


def wrong_canary(p: Publication) -> Publication:
    logprobs = p.canary_logprobs.copy()
    logprobs[7] += 2e-4
    return replace(p, canary_logprobs=logprobs)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (drop_from_manifest, THRESHOLD),
        (add_to_manifest, "model.extra.weight"),
        (change_spec(dtype="bfloat16"), QUERY),
        (change_spec(shape=(32, 1)), QUERY),
        (lose_bucket, "no bucket held it"),
        (flip_byte, QUERY),
        (drop_threshold, THRESHOLD),
        (round_threshold, THRESHOLD),
        (negate, THRESHOLD),
        (swap_tensors, QUERY),
        (keep_stale, QUERY),
        (cut_bucket, "lm_head.weight"),
        (wrong_canary, "canary token 8: log-prob off by 2.0"),
        (lambda p: replace(p, canary_logprobs=np.full(23, np.nan, np.float32)), "canary token 1"),
        (lambda p: replace(p, version=replace(p.version, digest="0" * 32)), "whole policy"),
        (lambda p: replace(p, digests=p.digests[:-1]), "digests for"),
    ],
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_faulty_publication_is_refused_by_name(
    transport: str, fault: Callable[[Publication], Publication], named: str
) -> None:
    rollout, learner = make(0), make(1)
    receiver = WeightReceiver(PolicyWeights(rollout))
    before = {name: digest(tensor) for name, tensor in rollout.state_dict().items()}
    with pytest.raises(SyncError, match=r"weight sync of version 5 refused: ") as error:
        receive(receiver, fault(publish(learner, 5)), transport)
    assert named in str(error.value) and "\n" not in str(error.value)
    assert {n: digest(t) for n, t in rollout.state_dict().items()} == before
    assert receiver.version is None
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
    with pytest.raises(SyncError, match="no publication has been accepted"):
        receiver.commit()
    receive(receiver, publish(learner, 6), transport)  # a good one afterwards is taken
    assert receiver.version is not None and receiver.version.number == 6


def test_what_is_verified_is_what_was_announced() -> None:
    """And nothing is swapped that was not verified, nor twice."""
    learner = make(1)
    receiver = WeightReceiver(PolicyWeights(make(0)))
    publication = publish(learner, 5)
    receiver.begin(replace(publication.announced, number=4))
    for bucket in publication.buckets:
        receiver.load(bucket)
    with pytest.raises(SyncError, match=r"version 4 refused: another version, or other tensors"):
        receiver.verify(publication)
    receiver.begin(publication.announced)
    with pytest.raises(SyncError, match="version 5 refused: it was not verified"):
        receiver.commit()
    receive(receiver, publication)
    assert set(receiver.seconds) == {"verify", "keep", "swap", "prove", "canary"}
    with pytest.raises(SyncError, match="no publication has been accepted"):
        receiver.commit()


def test_a_swap_that_breaks_off_leaves_the_old_weights() -> None:
    """As where memory ends in the middle of it."""
    rollout = make(0)
    before = {name: digest(tensor) for name, tensor in rollout.state_dict().items()}
    weights = dict(make(1).state_dict())
    weights[QUERY] = torch.zeros(3, 3)
    with pytest.raises(RuntimeError), PolicyWeights(rollout).serving(weights):
        raise AssertionError
    assert {n: digest(t) for n, t in rollout.state_dict().items()} == before


def test_a_receiver_that_rounds_is_caught_after_the_swap() -> None:
    """The live tensors are digested, not the copies that came in."""
    rollout, learner = make(0), make(1)
    bias = rollout.get_buffer(THRESHOLD)

    class Rounding(PolicyWeights):
        def difference(self, publication: Publication) -> str | None:
            bias.copy_(bias.bfloat16().float())
            return super().difference(publication)

    old = digest(rollout.state_dict()[QUERY])
    with pytest.raises(SyncError, match=THRESHOLD):
        receive(WeightReceiver(Rounding(rollout)), publish(learner, 5))
    assert digest(rollout.state_dict()[QUERY]) == old
