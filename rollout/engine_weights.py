"""The weights of an engine that loads tensors under the names that checkpoints have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..configs.errors import RunFailed, UserError
from ..policy import Policy, PolicyConfig
from ..policy.shards import Shards, read_bits, stored_manifest
from ..policy.stored import stored_parts
from ..policy.weights import Bucket, Publication, WeightManifest, layout, views

Stored = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


class WeightEngine(Protocol):
    """What loads weights between two steps, and says what it serves. Tensors are named as in the
    checkpoint that it started from."""

    def take(self, bucket: Bucket) -> Bucket:
        """As in `Holder`."""
        ...

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Serve other tensors in the place of all of the checkpoint's. `RunFailed` where they are
        not those by name and shape, before anything is touched, and where loading fails."""
        ...

    def difference(self, weights: Mapping[str, Tensor]) -> str | None:
        """What is being served and is not what loading ``weights`` gives, bit for bit, naming the
        first tensor; None if nothing. Nothing is changed."""
        ...

    def score(self, token_ids: np.ndarray, temperature: float) -> np.ndarray:
        """Log-probs of tokens 1..n-1 of int64 [n], fp32 [n - 1], without a step of anybody else."""
        ...


class EngineWeights:
    """`Holder` of an engine. What it serves is kept on the host, to go back to: copied there, where
    it comes on a GPU, before it is served.

    ``manifest`` is that of publications, whose tensors ``stored`` renames and divides; ``rounds``
    as in `Holder`.
    """

    def __init__(
        self,
        engine: WeightEngine,
        folder: Path,
        manifest: WeightManifest,
        stored: Stored,
        rounds: bool = False,
    ) -> None:
        self.rounds = rounds
        self._engine, self._folder, self._stored = engine, folder, stored
        self._manifest = manifest
        self._held: Mapping[str, Tensor] | None = None  # None: what the folder's files have
        self._next: Mapping[str, Tensor] = {}
        self._memory: list[Tensor] = []  # pinned, of the next set, and of that which is served
        self._loaded: dict[str, Tensor] = {}

    @property
    def manifest(self) -> WeightManifest:
        return self._manifest

    def take(self, bucket: Bucket) -> Bucket:
        return self._engine.take(bucket)

    def prepare(self, weights: Mapping[str, Tensor]) -> None:
        device = next((t.device for t in weights.values() if t.is_cuda), None)
        if device is None:
            self._next = dict(weights)
            return
        specs = self._manifest.specs
        if not self._memory:
            size = layout(specs)[1]
            self._memory = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._next = views(specs, self._memory[0])
        aside = torch.cuda.Stream(device)  # sampling goes on meanwhile
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            for name, kept in self._next.items():
                kept.copy_(weights[name], non_blocking=True)
        aside.synchronize()

    @contextmanager
    def serving(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        self._loaded = self._stored(weights)
        try:
            self._engine.load(self._loaded)
            yield
        except BaseException:
            self._go_back()
            raise
        finally:
            self._loaded = {}  # perhaps memory of the learner
        self._held = self._next
        self._memory.reverse()

    def difference(self, publication: Publication) -> str | None:
        return self._engine.difference(self._loaded)

    def score(self, token_ids: np.ndarray, temperature: float) -> np.ndarray:
        return self._engine.score(token_ids, temperature)

    def _go_back(self) -> None:
        """Serve what was served before; RunFailed unless that is proven."""
        old = read_stored(self._folder) if self._held is None else self._stored(self._held)
        self._engine.load(old)
        lost = self._engine.difference(old)
        if lost is not None:
            raise RunFailed(
                f"weight sync: the weights of before are not served again ({lost}); resume the run"
            )


def policy_weights(
    engine: WeightEngine, folder: Path, config: PolicyConfig, rounds: bool = False
) -> EngineWeights:
    """The `Holder` of an engine that started from the checkpoint of one of our policies.

    UserError for one beside a vision tower, whose tensors no publication has.
    """
    if config.nested:
        raise UserError(
            f"{folder}: has a vision tower, which rollout.engine=vllm does not take; use "
            "rollout.engine=native"
        )
    with torch.device("meta"):
        manifest = WeightManifest.of(Policy(config).state_dict())
    decays = {s.shape for s in stored_manifest(folder).specs if s.name.endswith(".A_log")}
    if len(decays) == 1:
        config.remember_a_log(decays.pop())

    def stored(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: part
            for whole, tensor in weights.items()
            for name, part in stored_parts(whole, tensor, config, export=False)
        }

    return EngineWeights(engine, folder, manifest, stored, rounds)


def read_stored(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder, as they lie in its files."""
    with Shards(folder) as shards:
        return {stored.name: read_bits(stored) for stored in shards.tensors.values()}
