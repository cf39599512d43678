"""DeepSpeed, behind the few calls the learner makes; no other file imports it.

What is decided here and why:

- The loss handed to `Engine.backward` is a sum over tokens divided by the token count of the
  whole optimizer step. DeepSpeed averages gradients over ranks and knows nothing of the split
  into micro-batches (its accumulation count stays 1; the last micro-batch is marked by hand), so
  multiplying by the number of ranks is the only scaling there is.
- DeepSpeed does not check fp32 gradients for overflow, and a step that ZeRO skips leaves no name
  behind: the norm is taken before the step, and a step that is not finite is dropped here
  together with the name of its first bad tensor.
- bfloat16 is torch autocast over fp32 parameters; gradients travel in fp32 then too.
- State for resuming is kept by parameter name, so that it can be read back with another number
  of ranks or another ZeRO stage.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..configs.schema import LearnerConfig
from ..policy.weights import WeightManifest
from .collective import all_reduce
from .divided import Divided, check_divided, whole_shapes
from .gradients import grad_norm, part_norms, parts_of
from .optimizer import (
    lay_out,
    make_optimizer,
    moment_keys,
    new_moments,
    optimized,
    uses_muon,
)
from .settings import deepspeed_config

GATHER_BYTES = 256 << 20  # full tensors held at once while shards are gathered


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of an optimizer step: the gradient norm before clipping, of all and of each part, and
    the first tensor whose gradient was not finite; where there is one, nothing was changed."""

    grad_norm: float
    part_norms: Mapping[str, float]
    bad_tensor: str | None

    @property
    def applied(self) -> bool:
        """Whether the weights moved."""
        return self.bad_tensor is None


def join(rank: int, world_size: int, rendezvous: str, device: str, local_rank: int = 0) -> None:
    """Join a process group; once per process, before any `Engine` exists.

    ``rendezvous`` is a torch init method: ``file://...`` for ranks of one machine, which opens
    no port to others, ``tcp://address:port`` across machines, "" for a single rank. ``device``
    is "cpu" or "cuda", there the GPU number ``local_rank`` of those that this process sees.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(local_rank))
    os.environ["DS_ACCELERATOR"] = device
    if not rendezvous.startswith("tcp://"):
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", _loopback())
    backend = "nccl" if device == "cuda" else "gloo"
    if rendezvous:
        dist.init_process_group(
            backend,
            init_method=rendezvous,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(minutes=30),
        )
    else:
        store = dist.HashStore()  # type: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def leave() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _loopback() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


@runtime_checkable
class _WithLeaves(Protocol):
    def leaf_modules(self) -> list[type[nn.Module]]: ...


class Engine:
    """One rank of a data-parallel learner, around a policy that every rank built alike."""

    def __init__(self, policy: nn.Module, config: LearnerConfig) -> None:
        import deepspeed  # reads the environment that `join` sets

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # torch announces renamed collectives at every call of ZeRO 3.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        # None of its own ops: it would look for a compiler of each, and on CPUs compile collectives
        # that reduce in an order of their own.
        deepspeed.ops.__dict__["__compatible_ops__"] = {}
        self.policy, self.config = policy, config
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.stage = config.zero_stage
        self.lr = config.lr
        self.applied_steps = 0
        # The names are taken before ZeRO 3 replaces the tensors by shards.
        self.manifest = WeightManifest.of(whole_shapes(policy))
        check_divided(policy, config.expert_parallel)
        group_name = f"ep_size_{config.expert_parallel}"  # as DeepSpeed calls it
        self._divided = Divided(policy, self._expert_group(group_name), group_name)
        self._parameters = {n: p for n, p in policy.named_parameters() if p.requires_grad}
        self._parts = {n: p for n, p in parts_of(policy).items() if n in self._parameters}
        muon = config.optimizer == "muon"
        self._moments = {
            name: moment_keys(muon and uses_muon(name, parameter))
            for name, parameter in self._parameters.items()
        }
        leaves = policy.leaf_modules() if isinstance(policy, _WithLeaves) else []
        if self.stage == 3 and leaves:
            deepspeed.utils.set_z3_leaf_modules(policy, leaves)
        self._engine: Any = deepspeed.initialize(
            model=policy,
            optimizer=make_optimizer(self._parameters, config, self._divided.names, group_name),
            config=deepspeed_config(self._parameters, config),
            dist_init_required=False,
        )[0]
        self.device: torch.device = torch.device(self._engine.device)
        if config.optimizer == "muon":
            lay_out(self._engine, self.stage, policy)

    def _expert_group(self, name: str) -> Any:
        """The ranks over which experts are divided, None if they are not. DeepSpeed finds out about
        them by a module of its own kind, which here does nothing."""
        if self.config.expert_parallel == 1:
            return None
        import deepspeed
        from deepspeed.moe.layer import MoE
        from deepspeed.utils import groups

        class Marker(MoE):
            def __init__(self) -> None:
                nn.Module.__init__(self)
                self.num_experts = 1

            def set_deepspeed_parallelism(self, *_: Any, **__: Any) -> None: ...

        self.policy.add_module("divided", Marker())
        deepspeed.init_distributed(dist.get_backend(), dist_init_required=False)
        groups._create_expert_and_data_parallel(self.config.expert_parallel)
        return groups._get_expert_parallel_group(name)

    def forward(self, *args: Any, last: bool, **kwargs: Any) -> Any:
        """Forward of the policy; ``last`` marks the last micro-batch of an optimizer step."""
        self._engine.set_gradient_accumulation_boundary(last)
        return self._engine(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of ``loss``, this micro-batch's part of the global token mean."""
        self._engine.backward(loss * self.world_size)

    @torch.no_grad()
    def step(self) -> StepResult:
        """Clip and apply the accumulated gradient, or drop it when it is not finite."""
        norm = grad_norm(self._engine, self.stage, self._parameters, self._divided)
        parts = part_norms(
            *(self._engine, self.stage, self._parameters, self._parts),
            *(self._divided, self.all_reduce),
        )
        bad = None if math.isfinite(norm) else self._first_bad_tensor()
        for group in self._engine.optimizer.param_groups:
            group["lr"] = self.scheduled_lr() * group["lr_factor"]
        if self.stage > 0:
            self._engine.step()  # clips; drops a gradient whose norm is not finite
            assert self._engine.was_step_applied() == (bad is None)
        elif bad is None:
            if 0 < self.config.grad_clip < norm:
                torch.nn.utils.clip_grads_with_norm_(
                    self._parameters.values(),
                    self.config.grad_clip,
                    torch.tensor(norm, device=self.device),
                    foreach=True,
                )
            self._engine.step()
        else:
            self._engine.zero_grad()
        if self.stage == 3:
            # Else a parameter that gets no gradient in the next first micro-batch would keep this.
            self._engine.optimizer.grad_partitions_flat_buffer.zero_()
        self.applied_steps += bad is None
        return StepResult(norm, parts, bad)

    def scheduled_lr(self) -> float:
        """Learning rate of the next step: linear warm-up over the steps that were applied."""
        warmup = self.config.warmup_steps
        return self.lr * min(1.0, (self.applied_steps + 1) / warmup) if warmup else self.lr

    def all_reduce(self, tensors: Sequence[Tensor], op: str = "sum") -> None:
        """As `farhorizon.rl.collective.all_reduce`."""
        all_reduce(tensors, op)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.all_reduce([torch.zeros(1, device=self.device)])

    def random_states(self) -> list[Tensor]:
        """torch's CPU random state of every rank, uint8."""
        mine = torch.get_rng_state().to(self.device)
        states = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(states, mine)
        return [state.cpu() for state in states]

    def gathered_state(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and persistent buffer in manifest order, whole, on every rank.

        A collective: all ranks must consume it to the end. Who holds a tensor has its numbers until
        the next update.
        """
        live = dict(self.policy.named_parameters(remove_duplicate=False))
        live |= dict(self.policy.named_buffers(remove_duplicate=False))
        for names in self._chunks():
            with self._whole([live[name] for name in names]):
                for name in names:
                    yield name, self._divided.whole(name, live[name].detach())

    @property
    def moment_names(self) -> list[str]:
        """``name:moment`` of all that `moments` gives once a step was applied."""
        return [f"{name}:{key}" for name, keys in self._moments.items() for key in keys]

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """Optimizer state as ``(parameter name:moment, tensor)``, whole, on every rank."""
        if self.applied_steps == 0:
            return
        from deepspeed.utils import safe_get_full_optimizer_state

        self._link_moments()
        for name, parameter in self._parameters.items():
            for key in self._moments[name]:
                if self.stage == 0:
                    value = self._engine.optimizer.state[parameter][key]
                else:
                    value = safe_get_full_optimizer_state(parameter, key)
                assert value is not None, name
                yield f"{name}:{key}", self._divided.whole(name, value)

    @torch.no_grad()
    def restore(
        self, state: Mapping[str, Tensor], moments: Mapping[str, Tensor], applied_steps: int
    ) -> None:
        """Take over weights by name, moments by ``name:moment``, and the step count.

        The mappings may read lazily from disk; each tensor is asked for once, on every rank.
        """
        self.applied_steps = applied_steps
        self._restore_weights(state)
        if applied_steps == 0:
            return
        self._make_moments()
        for name, parameter in self._parameters.items():
            for key in self._moments[name]:
                value = self._divided.own(name, moments[f"{name}:{key}"]).to(self.device)
                if self.stage == 0:
                    self._engine.optimizer.state[parameter][key].copy_(value)
                else:
                    self._store(parameter, value, key)

    @torch.no_grad()
    def scale_rows(self, factors: Mapping[str, Tensor]) -> None:
        """Multiply rows of matrices by ``factors [rows]`` by name, alike on every rank."""
        from deepspeed.utils import safe_get_full_fp32_param

        for name, rows in factors.items():
            parameter = self._parameters[name]
            whole = parameter if self.stage == 0 else safe_get_full_fp32_param(parameter)
            assert whole is not None, name
            scaled = whole * rows[:, None]
            with self._whole([parameter], modify=True):
                parameter.copy_(scaled)
            if self.stage > 0:
                self._store(parameter, scaled)

    def _restore_weights(self, state: Mapping[str, Tensor]) -> None:
        live = dict(self.policy.named_parameters(remove_duplicate=False))
        live |= dict(self.policy.named_buffers(remove_duplicate=False))
        for names in self._chunks():
            values = {n: self._divided.own(n, state[n]).to(self.device) for n in names}
            with self._whole([live[name] for name in names], modify=True):
                for name in names:
                    live[name].copy_(values[name])
            for name in names:
                if self.stage > 0 and name in self._parameters:
                    self._store(live[name], values[name])

    def _store(self, parameter: Tensor, value: Tensor, key: str | None = None) -> None:
        """Put the whole ``value`` into ZeRO's shard of a moment, or of the fp32 master."""
        if self.stage < 3:
            from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

            if key is None:
                safe_set_full_fp32_param(parameter, value)
            else:
                safe_set_full_optimizer_state(parameter, value, key)
            return
        # DeepSpeed's own call fails where the last shards are padded.
        shard, _ = self._engine.optimizer._get_fp32_opt_state_partition(parameter, False, key)
        start = self.rank * shard.numel()
        part = value.flatten()[start : start + shard.numel()]
        shard[: len(part)].copy_(part)

    def _make_moments(self) -> None:
        """Create the optimizer state that torch would create in its first step."""
        optimizer = self._engine.optimizer
        base = optimizer if self.stage == 0 else optimizer.optimizer
        for group, tensor in optimized(self._engine, self.stage):
            base.state[tensor] = new_moments(group, tensor, self.applied_steps)
        self._link_moments()

    def _link_moments(self) -> None:
        """Let parameters of ZeRO 1 and 2 find their moments.

        DeepSpeed links them once, after the first parameter group stepped: the moments of later
        groups do not exist yet at that time.
        """
        if self.stage in (1, 2):
            self._engine.optimizer._hp_optimizer_states_linked = False
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _whole(self, tensors: list[Tensor], modify: bool = False) -> Any:
        """Context in which sharded parameters are whole; with ``modify`` rank 0's writes count."""
        if self.stage != 3:
            return nullcontext()
        from deepspeed.runtime.zero import GatheredParameters

        sharded = [t for t in tensors if hasattr(t, "ds_id")]
        return GatheredParameters(sharded, modifier_rank=0 if modify else None)

    def _chunks(self) -> Iterator[list[str]]:
        """Names of the manifest in runs of at most `GATHER_BYTES`."""
        names: list[str] = []
        total = 0
        for spec in self.manifest.specs:
            if names and total + spec.nbytes > GATHER_BYTES:
                yield names
                names, total = [], 0
            names.append(spec.name)
            total += spec.nbytes
        yield names

    def _first_bad_tensor(self) -> str:
        """The first parameter whose gradient is not finite, or else the one of largest norm."""
        from deepspeed.utils import safe_get_full_grad

        found: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            gradient = safe_get_full_grad(parameter)
            if gradient is not None:
                found[name] = gradient.double().square().sum()
        sums = self._divided.pooled([*found], torch.stack([*found.values()])).tolist()
        sizes = dict(zip(found, sums, strict=True))
        bad = (name for name, size in sizes.items() if not math.isfinite(size))
        return next(bad, max(sizes, key=sizes.__getitem__))
