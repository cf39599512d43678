"""Under which names, and in which shapes and dtypes, the tensors of a policy lie in files.

Experts are one tensor per layer in memory and one per expert in files, there possibly as 4-bit
floats. ``A_log`` is padded or has more dimensions, and beside a vision tower every name has a
prefix. Some parameters are fp32 whatever the others are. The tensors of a vision tower that was not
built stay in their files until the policy is saved.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from ..configs.errors import UserError
from ..kernels.moe import mxfp4_encode
from .carried import TOWER, CarriedTower, has_tower
from .config import PolicyConfig
from .model import Policy
from .moe import Experts
from .records import listed
from .shards import (
    FLOATS,
    PREFIX,
    Shards,
    StoredTensor,
    check_finite,
    read_floats,
    read_mxfp4,
)
from .vision import Projector, VisionTower

PADDED_HEADS = 128  # a published A_log beside a vision tower is padded to a multiple of this
LISTED = 16  # names in a message

_FUSED = re.compile(r"(.+\.block_sparse_moe\.experts)\.(w[123])")
_THRESHOLD = ".gate.e_score_correction_bias"
_WIDE = (".A_log", ".dt_bias", "_conv1d.weight", ".o_norm.weight")  # fp32 in published files
_PACKED, _SCALE = "_packed", "_scale"  # after the name of a matrix
_BOUND_NOTE = "gate_lower_bound"  # in the headers of our files


def file_names(name: str, shape: Iterable[int]) -> list[str]:
    """Under which names the tensor called ``name`` in memory is stored, without the prefix."""
    fused = _FUSED.fullmatch(name)
    if fused is None:
        return [name]
    return [f"{fused[1]}.{expert}.{fused[2]}.weight" for expert in range(next(iter(shape)))]


def stored_parts(
    name: str, tensor: Tensor, config: PolicyConfig, export: bool
) -> Iterator[tuple[str, Tensor]]:
    """The tensors in files that hold ``tensor``, where it is; they may share its memory.

    With ``export`` experts are encoded. UserError for one that is not finite.
    """
    tensor = tensor.detach()
    names = [_prefixed(stored, config) for stored in file_names(name, tensor.shape)]
    if _FUSED.fullmatch(name):
        for stored, part in zip(names, tensor, strict=True):
            check_finite(stored, part, torch.float32 if export else part.dtype)
            if not export:
                yield stored, part.contiguous()
                continue
            packed, scale = mxfp4_encode(part)
            yield stored + _PACKED, packed
            yield stored + _SCALE, scale
        return
    threshold = name.endswith(_THRESHOLD)
    check_finite(names[0], tensor, torch.float32 if threshold else tensor.dtype)
    if threshold:
        tensor = tensor.float()
    if name.endswith(".A_log"):
        shape = _a_log_shape(config, len(tensor))
        padding = tensor.new_zeros(torch.Size(shape).numel() - len(tensor))
        tensor = torch.cat([tensor, padding]).view(shape)
    yield names[0], tensor.contiguous()


def file_notes(config: PolicyConfig) -> dict[str, str]:
    """What weight files say of the function that their tensors are of, and the tensors do not."""
    return {_BOUND_NOTE: _bound(config)}


def read_weights(
    folder: Path, policy: Policy, dtype: torch.dtype | None, part: tuple[int, int]
) -> dict[str, Tensor]:
    """A state dict for ``policy``, filled piece by piece from the files of ``folder``.

    Parameters get ``dtype``, or keep that of the files if it is None; thresholds are fp32, and
    those parameters that are fp32 in the files are never made narrower. Of experts the ``part`` is
    read that the policy then keeps, as `load_policy` has it.
    """
    weights: dict[str, Tensor] = {}
    config = policy.config
    with Shards(folder) as shards:
        expected = policy.state_dict()
        names = {name: file_names(name, tensor.shape) for name, tensor in expected.items()}
        _check(shards, expected, names, config)
        _keep(policy, part)
        infinite: list[str] = []
        for name, tensor in policy.state_dict().items():
            fused = _FUSED.fullmatch(name) is not None
            kind = _dtype(name, names[name], shards, dtype)
            target, stored = torch.empty(tensor.shape, dtype=kind), names[name]
            if fused and len(tensor) < len(stored):
                stored = stored[part[0] * len(tensor) :][: len(tensor)]
            for one, place in zip(stored, target if fused else [target], strict=True):
                if fused and config.stores_mxfp4:
                    packed, scale = (shards.tensors[one + end] for end in (_PACKED, _SCALE))
                    finite = read_mxfp4(packed, scale, place)
                elif name.endswith(".A_log"):
                    finite = _read_a_log(shards.tensors[one], place)
                else:
                    finite = read_floats(shards.tensors[one], place)
                if not finite:
                    infinite.append(one)
            weights[name] = target
        if infinite:
            raise UserError(f"{folder}: tensors that are not finite: {listed(infinite, LISTED)}")
        _remember_a_log(shards, names, config)
        config.carry_tower(None if has_tower(names) else CarriedTower.of(shards))
    return weights


def _keep(policy: Policy, part: tuple[int, int]) -> None:
    """Let the policy, which is on the meta device, keep a part of the experts of each layer."""
    for module in policy.modules():
        if isinstance(module, Experts) and part[1] > 1 and module.count % part[1] == 0:
            module.keep(part)


def _check(
    shards: Shards, expected: dict[str, Tensor], names: dict[str, list[str]], config: PolicyConfig
) -> None:
    """Every tensor of the policy must be there with its shape, and nothing else."""
    folder, stored = shards.folder, shards.tensors
    wanted: dict[str, tuple[int, ...]] = {}
    has_experts = False
    for name, parts in names.items():
        shape = tuple(expected[name].shape)
        if _FUSED.fullmatch(name) is None:
            wanted[parts[0]] = shape
            continue
        has_experts = True
        rows, width = shape[1:]
        for part in parts:
            if config.stores_mxfp4:
                wanted[part + _PACKED] = (rows, width // 2)
                wanted[part + _SCALE] = (rows, width // 32)
            else:
                wanted[part] = (rows, width)
    packed = any(name.endswith(".weight" + _PACKED) for name in stored)
    if has_experts and packed != config.stores_mxfp4:
        said, found = ("no", "as packed") if packed else ("a", "as plain")
        raise UserError(
            f"{folder}: config.json has {said} quantization_config, but experts are stored "
            f"{found} weights"
        )
    if not has_tower(names):
        wanted |= _carried(config, stored)
    missing = sorted(wanted.keys() - stored.keys())
    extra = sorted(stored.keys() - wanted.keys())
    if missing or extra:
        problems = [
            f"tensors {kind}: {listed(found, LISTED)}"
            for kind, found in (("missing", missing), ("unknown", extra))
            if found
        ]
        raise UserError(f"{folder}: {'; '.join(problems)}")
    wrong = [
        f"{name} {list(stored[name].shape)} instead of {list(shape)}"
        for name, shape in wanted.items()
        if not _fits(stored[name], name, shape)
    ]
    if wrong:
        raise UserError(f"{folder}: tensors of the wrong shape: {listed(wrong, LISTED)}")
    other = [
        f"{n} {t.dtype}" for n, t in stored.items() if has_tower([n]) and t.dtype not in FLOATS
    ]
    if other:
        raise UserError(f"{folder}: tensors that are not floats: {listed(other, LISTED)}")
    misnamed = [
        tensor.name for name, tensor in stored.items() if tensor.name != _prefixed(name, config)
    ]
    if misnamed:
        some = "with" if config.nested else "without"
        raise UserError(
            f"{folder}: names of the text policy go {some} {PREFIX} beside this config.json, "
            f"of the vision tower always without, unlike {listed(misnamed, LISTED)}"
        )
    _check_gate(shards, config)
    if config.vision is not None and not has_tower(stored):
        raise UserError(
            f"{folder}: config.json has a vision_config, but no tensor of the vision tower is "
            "there; remove vision_config to go on without images"
        )


def _prefixed(name: str, config: PolicyConfig) -> str:
    """The name in files of what is called ``name`` without a prefix."""
    return PREFIX + name if config.nested and not name.startswith(TOWER) else name


def _carried(config: PolicyConfig, stored: dict[str, StoredTensor]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a tower that is not built but stays in its files; where config.json does
    not describe it, what there is of it."""
    if not config.nested or not has_tower(stored):
        return {}
    sizes = config.vision
    if sizes is None:
        return {name: tensor.shape for name, tensor in stored.items() if name.startswith(TOWER)}
    with torch.device("meta"):
        tower, projector = VisionTower(sizes), Projector(sizes, config.hidden_size)
    made = tower.state_dict(prefix=TOWER[0]) | projector.state_dict(prefix=TOWER[1])
    return {name: tuple(tensor.shape) for name, tensor in made.items()}


def _fits(stored: StoredTensor, name: str, shape: tuple[int, ...]) -> bool:
    if not name.endswith(".A_log"):
        return stored.shape == shape
    heads = shape[0]
    padded = len(stored.shape) == 1 and stored.shape[0] >= heads
    return padded or stored.shape == (1, 1, heads, 1)


def _check_gate(shards: Shards, config: PolicyConfig) -> None:
    """Only gates without a bound are published with an ``A_log`` of four dimensions; files of ours
    say the bound."""
    decays = {n: s.shape for n, s in shards.tensors.items() if n.endswith(".A_log")}
    bound = config.gate_lower_bound
    unbounded = {name: shape for name, shape in decays.items() if len(shape) == 4}
    if unbounded and bound is not None:
        name, shape = next(iter(unbounded.items()))
        raise UserError(
            f"{shards.folder}: config.json says linear_attn_config.gate_lower_bound={bound:g}, "
            f"but {name} {list(shape)} is that of a softplus gate, which has no bound: null"
        )
    if unbounded and len(unbounded) < len(decays):
        other = next(name for name in decays if name not in unbounded)
        raise UserError(
            f"{shards.folder}: config.json says linear_attn_config.gate_lower_bound=null for all "
            f"layers, but only some A_log have four dimensions, unlike {other}"
        )
    for file, notes in shards.notes.items():
        said = notes.get(_BOUND_NOTE, _bound(config))
        if said != _bound(config):
            raise UserError(
                f"{shards.folder}: config.json says linear_attn_config.gate_lower_bound="
                f"{_bound(config)}, but the weights in {file} are of a gate with {said}"
            )


def _bound(config: PolicyConfig) -> str:
    bound = config.gate_lower_bound
    return "null" if bound is None else repr(float(bound))


def _dtype(name: str, parts: list[str], shards: Shards, dtype: torch.dtype | None) -> torch.dtype:
    if name.endswith(_THRESHOLD):
        return torch.float32
    kinds = [FLOATS.get(shards.tensors[part].dtype) for part in parts if part in shards.tensors]
    stored = torch.bfloat16 if not kinds else kinds[0] or torch.float32
    for kind in kinds:
        stored = torch.promote_types(stored, kind or stored)
    if dtype is None:
        return stored
    keep = name.endswith(_WIDE) and stored.itemsize >= 4
    return torch.promote_types(dtype, torch.float32) if keep else dtype


def _read_a_log(stored: StoredTensor, place: Tensor) -> bool:
    """`read_floats` without the padding; `UserError` if that is not zero."""
    whole = torch.empty(torch.Size(stored.shape).numel(), dtype=place.dtype)
    finite = read_floats(stored, whole)
    if bool(whole[len(place) :].any()):
        raise UserError(
            f"{stored.file.name}: {stored.name} {list(stored.shape)} has more than the "
            f"{len(place)} heads of config.json's linear_attn_config.num_heads"
        )
    place.copy_(whole[: len(place)])
    return finite


def _remember_a_log(shards: Shards, names: dict[str, list[str]], config: PolicyConfig) -> None:
    shapes = {shards.tensors[name].shape for name in names if name.endswith(".A_log")}
    if len(shapes) == 1:
        config.remember_a_log(shapes.pop())


def _a_log_shape(config: PolicyConfig, heads: int) -> tuple[int, ...]:
    """As in the files that the policy was read from; else as published for its kind of gate."""
    if config.a_log_shape is not None:
        return config.a_log_shape
    if config.gate_lower_bound is None:
        return 1, 1, heads, 1
    return (-(-heads // PADDED_HEADS) * PADDED_HEADS if config.nested else heads,)
