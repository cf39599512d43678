"""``farhorizon plan``: how large a policy is, and what fits on given GPUs. Arithmetic only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ..configs.bounds import check_bounds
from ..configs.errors import UserError
from ..configs.schema import PlanConfig
from ..policy import Policy, PolicyConfig
from ..policy.count import (
    Counts,
    LearnerSizes,
    StateSizes,
    activation_bytes,
    count_parameters,
    count_vision,
    learner_sizes,
    state_sizes,
)
from ..policy.records import parse_config, read_config, read_json, read_stage
from ..rl.optimizer import uses_muon
from .fresh import policy_presets
from .prepare import find_checkpoint

GIB = 2**30
ITEMSIZE = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Fit:
    """What one GPU has room for: sequences of the context asked for, and tokens of each of the
    sequences asked for; None where length costs nothing, 0 where not even the weights fit."""

    batch: int | None
    context: int | None


@dataclass(frozen=True, slots=True)
class Trained:
    """Numbers of parameters: all, those of routed experts, and those that Muon has."""

    parameters: int
    experts: int = 0
    muon: int = 0

    @classmethod
    def of(cls, policy: PolicyConfig, config: PlanConfig) -> Trained:
        """Those of a text policy; UserError for experts that cannot be divided so."""
        counts = count_parameters(policy)
        experts, parts = counts.parts["routed experts"], config.expert_parallel
        if config.ranks % parts:
            raise UserError(f"expert_parallel={parts} must divide ranks={config.ranks}")
        if parts > 1 and (not experts or policy.num_experts % parts):
            number = policy.num_experts if experts else 0
            raise UserError(f"expert_parallel={parts} must divide the policy's {number} experts")
        if config.optimizer == "adamw":
            return cls(counts.total, experts)
        with torch.device("meta"):
            named = Policy(policy).named_parameters()
        return cls(counts.total, experts, sum(p.numel() for n, p in named if uses_muon(n, p)))

    def sizes(self, config: PlanConfig, zero_stage: int) -> LearnerSizes:
        """What a rank holds of them."""
        return learner_sizes(
            self.parameters,
            config.ranks,
            zero_stage,
            experts=self.experts,
            expert_parallel=config.expert_parallel,
            muon=self.muon,
        )


def zero_stages(config: PlanConfig) -> range:
    """Those that go with the settings, as `LearnerConfig` has them."""
    if config.expert_parallel == 1:
        return range(4)
    return range(1 if config.optimizer == "muon" else 3)


def plan(source: str, config: PlanConfig) -> int:
    """Print the sizes of what ``source`` names; 0."""
    check_bounds(config)
    policy, longest = read_policy(source)
    context = config.context or longest or policy.max_position_embeddings
    if context < 1:
        raise UserError(f"{source}: is trained for no context yet; give context=TOKENS")
    counts = count_parameters(policy)
    sizes = state_sizes(policy, ITEMSIZE[config.dtype])
    trained = Trained.of(policy, config)
    for line in (
        *_counted(policy, counts),
        *_vision(config, count_vision(policy)),
        *_rollout(config, counts, sizes, context),
        *_learner(config, trained, activation_bytes(policy, config.checkpointing), context),
    ):
        print(line)
    return 0


def read_policy(source: str) -> tuple[PolicyConfig, int | None]:
    """The policy that a preset, a folder or a ``config.json`` describes, and the context that a
    folder was trained for."""
    presets = policy_presets()
    path = presets.get(source, Path(source))
    if path.is_file():
        return parse_config(path, read_json(path)), None
    try:
        folder = find_checkpoint(path)
    except UserError as error:
        raise UserError(f"policy {error}; presets: {', '.join(presets)}") from None
    return read_config(folder), read_stage(folder).context


def rollout_fit(
    config: PlanConfig, counts: Counts, sizes: StateSizes, context: int
) -> tuple[Fit, int]:
    """What a rollout GPU decodes beside its share of the weights, and the bytes of that share."""
    weights = -(-counts.weight_bytes(ITEMSIZE[config.dtype]) // config.serve_gpus)
    room = usable_bytes(config) - weights
    if room <= 0:
        return Fit(0, 0), weights
    left = room // config.batch - sizes.fixed
    longest = max(0, left) // sizes.per_token if sizes.per_token else (None if left >= 0 else 0)
    return Fit(room // sizes.of(context), longest), weights


def learner_fit(
    config: PlanConfig, trained: Trained, per_token: int, context: int, zero_stage: int
) -> Fit:
    """What a rank trains in one micro-batch; a sequence is never split over ranks."""
    fixed = trained.sizes(config, zero_stage).total
    tokens = max(0, usable_bytes(config) - fixed) // per_token
    return Fit(tokens // context, tokens // config.batch)


def usable_bytes(config: PlanConfig) -> int:
    """Bytes of a GPU that are not held in reserve."""
    return int(config.gpu_gib * GIB * (1 - config.reserve))


def _counted(policy: PolicyConfig, counts: Counts) -> Iterator[str]:
    layers = range(policy.num_hidden_layers)
    num_mla = sum(policy.is_mla(i) for i in layers)
    num_moe = sum(not policy.is_dense(i) for i in layers)
    yield (
        f"layers          {len(layers)}: {len(layers) - num_mla} KDA + {num_mla} MLA; "
        f"{num_moe} with {policy.num_experts} experts, {policy.num_experts_per_token} per token"
    )
    yield f"parameters      {_count(counts.total)} total, {_count(counts.active)} active per token"
    for part, number in counts.parts.items():
        if number:
            yield f"  {part:<20}{_count(number):>12}{number / counts.total:>8.1%}"


def _vision(config: PlanConfig, parts: dict[str, int]) -> Iterator[str]:
    """What a run with images has beside all else that is listed; runs without any build none."""
    if not parts:
        return
    total = sum(parts.values())
    yield f"with images     {_count(total)} more, on top of what follows"
    for part, number in parts.items():
        yield f"  {part:<20}{_count(number):>12}"
    yield f"  {'rollout weights':<20}{_bytes(total * ITEMSIZE[config.dtype]):>12}"
    for stage in zero_stages(config):
        size = Trained(total).sizes(config, stage).total
        yield f"  {f'learner, ZeRO {stage}':<20}{_bytes(size):>12}"


def _rollout(config: PlanConfig, counts: Counts, sizes: StateSizes, context: int) -> Iterator[str]:
    fit, weights = rollout_fit(config, counts, sizes, context)
    yield ""
    gpu = f"a GPU of {config.gpu_gib:g} GiB, {config.reserve:.0%} free"
    yield f"rollout         {config.dtype}, {gpu}"
    shared = f"on each of {config.serve_gpus} that share a copy" if config.serve_gpus > 1 else ""
    yield f"  {'weights':<20}{_bytes(weights):>12}  {shared}".rstrip()
    yield f"  {'state':<20}{_bytes(sizes.fixed):>12}  per sequence"
    yield f"  {'cache':<20}{_bytes(sizes.per_token):>12}  per token"
    yield f"  {'sequence':<20}{_bytes(sizes.of(context)):>12}  at {context:,} tokens"
    if fit == Fit(0, 0):
        whole = counts.weight_bytes(ITEMSIZE[config.dtype])
        yield f"  {_misfit(config, whole, weights, sizes, context)}"
        return
    yield f"  largest batch       {_number(fit.batch):>12}  sequences of {context:,} tokens"
    yield f"  largest context     {_number(fit.context):>12}  tokens, batch {config.batch}"


def _misfit(config: PlanConfig, whole: int, weights: int, sizes: StateSizes, context: int) -> str:
    """What does not fit, and how many GPUs hold ``whole`` bytes of weights beside a sequence."""
    asked = f"a sequence of {context:,} tokens"
    fits = weights < usable_bytes(config)
    what = f"the weights fit, but not {asked} beside them" if fits else "the weights do not fit"
    room = usable_bytes(config) - sizes.of(context)
    if room < 1:
        return f"{what}; a GPU holds no {asked.removeprefix('a ')}: lower context"
    beside = "" if fits else f", with {asked}"
    return f"{what}: serve_gpus={-(-whole // room)} at least{beside}"


def _learner(config: PlanConfig, trained: Trained, per_token: int, context: int) -> Iterator[str]:
    name = "Muon" if trained.muon else "AdamW"
    parts = config.expert_parallel
    divided = f", experts over {parts} of them" if parts > 1 else ""
    again = ", layers computed again" if config.checkpointing == "layers" else ""
    yield ""
    whole = trained.parameters * 16  # on one rank: whatever is divided is shown in the same unit
    unit, size = next((u, s) for u, s in (("GiB", GIB), ("MiB", 2**20), ("B", 1)) if whole >= s)
    yield f"learner         {name}, fp32 masters, {config.ranks} ranks{divided}; {unit} on each"
    yield f"  activations take about {_bytes(per_token)} per token{again}"
    yield f"  {'ZeRO':<6}{'weights':>10}{'gradients':>11}{'optimizer':>11}{'all':>10}" + (
        f"{'largest batch':>15}{'largest context':>17}"
    )
    for stage in zero_stages(config):
        sizes = trained.sizes(config, stage)
        fit = learner_fit(config, trained, per_token, context, stage)
        cells = (sizes.weights, sizes.gradients, sizes.optimizer, sizes.total)
        widths = (10, 11, 11, 10)
        digits = 0 if size == 1 else 2
        row = "".join(f"{n / size:>{w},.{digits}f}" for n, w in zip(cells, widths, strict=True))
        yield f"  {stage:<6}{row}{_number(fit.batch):>15}{_number(fit.context):>17}"


def _count(number: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if number >= size:
            digits = 4 if unit == "T" else 1 if number >= 100 * size else 2
            return f"{number / size:,.{digits}f} {unit}"
    return f"{number:,}"


def _bytes(number: int) -> str:
    for unit, size in (("GiB", GIB), ("MiB", 2**20)):
        if number >= size:
            return f"{number / size:,.2f} {unit}"
    return f"{number:,} B"


def _number(value: int | None) -> str:
    return "any" if value is None else f"{value:,}"
