"""Ray shell of the learner: one actor per rank, and the group of them that the driver holds."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayError, RayTaskError
from transformers import PreTrainedTokenizerFast

from ..configs.errors import RunFailed, UserError, last_line, written
from ..configs.schema import AlgorithmConfig, LearnerConfig, SyncConfig, TeacherConfig
from ..policy.checkpoint import load_checkpoint, save_checkpoint
from ..policy.config import PolicyConfig
from ..policy.links import Meeting, Place
from ..policy.memory import free_cached
from ..policy.model import Policy
from ..policy.records import StageRecord
from ..policy.value import ValueHead
from ..policy.weights import Announcement, Publication
from ..rollout.types import Group
from . import batch, losses, resume
from .algorithms import Flat, make_algorithm
from .critic import Critic
from .engine import join, leave
from .learner import Learner
from .memory import enough_memory
from .objective import LossFunction, Objective
from .penalties import Pull
from .publish import Publisher
from .reference import Reference
from .replay import share_recorded
from .teachers import Distillation, Teachers, teaches
from .types import Share, UpdateResult

ACTOR_CPUS = 0.01  # Ray places by this number; the real use is set by ``threads``
DEATH_SECONDS = 5.0  # within which Ray tells of a process that its peers already miss


class LearnerActor:
    """One rank; `update` and all after it are collectives: every rank must be called."""

    def __init__(self, config: LearnerConfig, rank: int, seed: int) -> None:
        if config.threads > 0:
            torch.set_num_threads(config.threads)
        torch.manual_seed(seed)
        self.config, self.rank, self.seed = config, rank, seed

    def address(self) -> tuple[str, int]:
        """This machine's address in the cluster, and a port of it that was free a moment ago."""
        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return address, probe.getsockname()[1]

    def start(
        self,
        checkpoint: str,
        rendezvous: str,
        temperature: float,
        vision: bool = False,
        critic: bool = False,
        reference: tuple[str, Pull] | None = None,
        teachers: tuple[Sequence[TeacherConfig], Distillation] | None = None,
    ) -> None:
        """Join the other ranks and build the learner around the policy of ``checkpoint``, which
        gets a value head for a ``critic`` if it has none, is pulled to that of ``reference``, and
        learns from those of ``teachers``.
        """
        device = "cuda" if self.config.gpus > 0 else "cpu"
        join(self.rank, self.config.ranks, rendezvous, device)
        among = self.config.expert_parallel  # consecutive ranks
        loaded = load_checkpoint(checkpoint, vision=vision, part=(self.rank % among, among))
        self.tokenizer: PreTrainedTokenizerFast = loaded.tokenizer
        self.policy_config: PolicyConfig = loaded.policy.config
        if critic and loaded.policy.v_head is None:
            loaded.policy.v_head = ValueHead(self.policy_config.hidden_size)
        kept = taught = None
        with enough_memory(loaded.policy, (), self.config):
            policy = loaded.policy.to(torch.device(device))  # type: ignore[arg-type] - Module.to
            if reference is not None:
                kept = Reference(_copy(reference[0], vision, device), reference[1], temperature)
            if teachers is not None:
                folders = dict.fromkeys(teacher.policy for teacher in teachers[0])
                copies = {folder: _copy(folder, vision, device) for folder in folders}
                taught = Teachers(teachers[0], copies, teachers[1], temperature)
            self.learner = Learner(policy, self.config, temperature, kept, taught)
        self.publisher = Publisher(self.learner, self.seed, policy.config.vocab_size, ray.put)
        free_cached(self.config.gpus)

    def update(
        self, steps: Sequence[Share], loss: LossFunction, decoupled: bool, critic: Critic | None
    ) -> UpdateResult:
        """Optimizer steps on this rank's shares."""
        result = self.learner.update(steps, loss, decoupled, critic)
        free_cached(self.config.gpus)
        return result

    def evaluate(self, share: Share) -> float:
        """Mean negative log-likelihood over all ranks."""
        return self.learner.evaluate(share)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate that follows warm-up."""
        self.learner.engine.lr = lr

    def place(self) -> Place:
        """Where this rank runs."""
        return Place.here(ray.util.get_node_ip_address(), self.config.gpus > 0)

    def connect(self, transport: str, host: str, readers: int) -> Meeting | None:
        """As `Publisher.connect`, and the other calls of a sync."""
        return self.publisher.connect(transport, host, readers)

    def announce(self) -> Announcement:
        return self.publisher.announce()

    def publish(self, config: SyncConfig) -> Publication | None:
        return self.publisher.publish(config)

    def release(self) -> None:
        self.publisher.release()
        free_cached(self.config.gpus)

    def save_policy(self, folder: str, stage: StageRecord) -> None:
        """Write a checkpoint folder."""
        engine = self.learner.engine
        state = engine.gathered_state()
        if self.rank == 0:
            with written(folder):
                save_checkpoint(folder, state, self.policy_config, self.tokenizer, stage)
        else:
            for _ in state:
                pass
        engine.barrier()

    def save(self, folder: str) -> None:
        """Write what `load` needs to continue bit for bit."""
        with written(folder):
            resume.save(self.learner, Path(folder))

    def load(self, folder: str) -> int:
        """Continue from a saved state; returns the version."""
        resume.load(self.learner, Path(folder))
        return self.learner.version

    def close(self) -> None:
        """Leave the process group, so that no rank reports the others' end as a failure."""
        leave()


def _copy(folder: str, vision: bool, device: str) -> Policy:
    """A policy that scores and never learns."""
    policy = load_checkpoint(folder, vision=vision).policy
    policy.v_head = None
    policy.to(torch.device(device))  # type: ignore[arg-type] - Module.to
    return policy


class LearnerGroup:
    """All ranks of a run's learner, used from the driver.

    Raises the user's mistakes and failures that a line says all about as they were raised in the
    actor, without Ray's wrapping. The first failure ends all ranks: the others would wait
    for it in a collective. ``vision`` trains the policy's vision tower too. ``reference`` is the
    checkpoint that an algorithm with a pull stays near, ``checkpoint`` by itself; ``teachers`` are
    those of one that distills.
    """

    def __init__(
        self,
        checkpoint: str,
        config: LearnerConfig,
        algorithm: AlgorithmConfig,
        sync: SyncConfig,
        seed: int,
        temperature: float,
        vision: bool = False,
        reference: str | None = None,
        teachers: Sequence[TeacherConfig] = (),
    ) -> None:
        self.config, self.sync_config = config, sync
        self.algorithm = make_algorithm(algorithm)
        self.version = 0
        self._folder: str | None = None
        actor: Any = ray.remote(num_cpus=ACTOR_CPUS, num_gpus=config.gpus)(LearnerActor)
        self.actors: list[Any] = [actor.remote(config, r, seed) for r in range(config.ranks)]
        rendezvous = self._rendezvous()
        critic = self.algorithm.critic is not None
        pull = self.algorithm.pull
        near = None if pull is None else (reference or checkpoint, pull)
        taught, self.teachers = None, tuple[TeacherConfig, ...]()
        if (distillation := self.algorithm.distillation) is not None:
            self.teachers = tuple(teachers)
            taught = self.teachers, distillation
        start = (checkpoint, rendezvous, temperature, vision, critic, near, taught)
        self._starting = [a.start.remote(*start) for a in self.actors]

    def ready(self) -> None:
        """Wait until every rank has built its part; any other call waits as well.

        Construction returns at once, so that the rollout actors can start at the same time.
        """
        starting, self._starting = self._starting, []
        self._results(starting)

    def update(self, groups: Sequence[Group]) -> UpdateResult:
        """Learn from one rollout batch, in ``minibatches`` optimizer steps.

        Where no group has anything to teach nothing happens, and the result says so.
        """
        kept, stats = self._samples(groups, self.algorithm.flat)
        metrics = stats.metrics()
        if not kept:
            return UpdateResult(metrics, self.version, skipped=True)
        if self.config.replay == "rollout":
            metrics["routes_known"] = share_recorded(kept)
        metrics |= stats.staleness(self.version)
        steps = batch.deal(kept, self.config.minibatches)
        return self._update(
            [self._shares(samples) for samples in steps],
            self.algorithm.loss,
            metrics,
            self.algorithm.decoupled,
            self.algorithm.critic,
        )

    def teaching(self, groups: Sequence[Group]) -> int:
        """Number of groups that have an advantage."""
        return len(self._samples(groups, "left_out")[0])

    def update_nll(self, sequences: Sequence[np.ndarray]) -> UpdateResult:
        """One optimizer step on the negative log-likelihood of every token but each first.

        UserError if no sequence has a second token.
        """
        samples = batch.samples_of_text(sequences)
        if not samples:
            raise UserError("text: no sequence of a batch has a second token; give more text")
        shares = self._shares(samples)
        tokens: dict[str, float] = {"trained_tokens": shares[0].denominator}
        return self._update([shares], Objective(losses.nll), tokens)

    def evaluate_nll(self, sequences: Sequence[np.ndarray]) -> float:
        """Mean negative log-likelihood per token, in nats; changes nothing."""
        shares = self._shares(batch.samples_of_text(sequences))
        return self._each("evaluate", [(share,) for share in shares])[0]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate that follows warm-up."""
        self._call("set_lr", lr)

    def ask(self, method: str, *arguments: Any) -> Any:
        """What rank 0 answers to a call that is no collective."""
        self.ready()
        return self._results([getattr(self.actors[0], method).remote(*arguments)])[0]

    def start_publishing(self) -> list[ray.ObjectRef]:
        """Let every rank give its part of the current version; returns at once."""
        self.ready()
        return [actor.publish.remote(self.sync_config) for actor in self.actors]

    def published(self, refs: Sequence[ray.ObjectRef]) -> Publication:
        """What came of `start_publishing`, for those who take the version over."""
        return self._results(list(refs))[0]

    def save_policy(self, folder: str | Path, stage: StageRecord) -> None:
        """Write the policy as a checkpoint folder."""
        self._call("save_policy", str(folder), stage)

    def save(self, folder: str | Path) -> None:
        """Write the learner's state; ``folder`` must be reachable from rank 0."""
        self._call("save", str(folder))

    def load(self, folder: str | Path) -> None:
        """Continue from a saved state; ``folder`` must be reachable from every rank."""
        self.version = self._call("load", str(folder))[0]

    def close(self) -> None:
        """End the ranks; safe to call twice."""
        closing = [actor.close.remote() for actor in self.actors]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=5)
        self._kill()

    def _update(
        self,
        steps: Sequence[list[Share]],
        loss: LossFunction,
        metrics: dict[str, float],
        decoupled: bool = False,
        critic: Critic | None = None,
    ) -> UpdateResult:
        ranks = range(self.config.ranks)
        own = [([shares[rank] for shares in steps], loss, decoupled, critic) for rank in ranks]
        result: UpdateResult = self._each("update", own)[0]
        self.version = result.version
        return UpdateResult(
            {**metrics, **result.metrics}, result.version, result.skipped, result.bad_tensor
        )

    def _samples(
        self, groups: Sequence[Group], flat: Flat
    ) -> tuple[list[list[batch.Sample]], batch.BatchStats]:
        own = self.algorithm
        return batch.samples_of_groups(
            *(groups, own.advantages, flat),
            credit=own.credit,
            shaping=own.shaping,
            taught=lambda kind: any(teaches(teacher, kind) for teacher in self.teachers),
        )

    def _shares(self, samples: Sequence[batch.Sample]) -> list[Share]:
        return batch.shares(samples, self.config.ranks, self.config.micro_batch_tokens)

    def _rendezvous(self) -> str:
        """Where the ranks meet: a file on one machine, rank 0's address across machines."""
        if self.config.ranks == 1:
            return ""
        if sum(node["Alive"] for node in ray.nodes()) == 1:
            self._folder = tempfile.mkdtemp(prefix="farhorizon-")
            return f"file://{self._folder}/rendezvous"
        address, port = ray.get(self.actors[0].address.remote())
        return f"tcp://{address}:{port}"

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        return self._each(method, [arguments] * len(self.actors))

    def _each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call every rank with its own arguments; results in the order of ranks."""
        self.ready()
        return self._results(
            [
                getattr(actor, method).remote(*own)
                for actor, own in zip(self.actors, arguments, strict=True)
            ]
        )

    def _results(self, refs: list[ray.ObjectRef]) -> list[Any]:
        waiting = list(refs)
        try:
            while waiting:
                done, waiting = ray.wait(waiting)
                ray.get(done)
            return ray.get(refs)
        except RayTaskError as error:
            told = isinstance(error.cause, (UserError, RunFailed))
            death = None if told else _death(waiting)  # a peer may notice it before Ray does
            self._kill()
            if death is not None:
                raise _ended(death) from error
            if told:
                raise error.cause from None
            raise  # whose text is the rank's own traceback
        except RayError as error:
            self._kill()
            raise _ended(error) from error

    def _kill(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _death(refs: list[ray.ObjectRef]) -> RayError | None:
    """How one of the actors behind ``refs`` ended, if one does within `DEATH_SECONDS`."""
    deadline = time.monotonic() + DEATH_SECONDS
    while refs and (left := deadline - time.monotonic()) > 0:
        done, refs = ray.wait(refs, timeout=left)
        try:
            ray.get(done)
        except RayTaskError:
            pass  # one more rank that missed its peer
        except RayError as error:
            return error
    return None


def _ended(error: Exception) -> RunFailed:
    return RunFailed(
        "a rank of the learner ended while it worked: it was killed, or ran out of memory "
        f"({last_line(error)})"
    )
