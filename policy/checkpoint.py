"""Checkpoint folders in the published layout, with the context they were trained for.

A folder holds ``config.json``, ``model.safetensors`` (or shards with an index), the tokenizer and
``stage.json``. Tensors carry the published names, one per expert; in memory the experts of a
layer are one tensor. Nothing is ever unpickled.

A folder is written beside its place and renamed into it: a reader finds a whole checkpoint or
none. Every tensor of the configured policy must be there with its shape, in memory as in files:
a threshold that is missing is an error, never zeros.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ..configs.errors import UserError
from .config import PolicyConfig
from .model import Policy
from .records import (
    STAGE_FILE,
    StageRecord,
    listed,
    one_line,
    read_config,
    read_json,
    read_stage,
    write_json,
)
from .tokenizer import END_OF_MESSAGE, load_tokenizer, tokenizer_sha256

SHARD_BYTES = 4 * 10**9
INDEX_FILE = "model.safetensors.index.json"
ARCHITECTURE = "KimiLinearForCausalLM"

Weights = Policy | Mapping[str, Tensor] | Iterator[tuple[str, Tensor]]

_FUSED = re.compile(r"(.+\.block_sparse_moe\.experts)\.(w[123])")
_THRESHOLD = ".gate.e_score_correction_bias"
_PREFIX = "language_model."  # published checkpoints with a vision tower
_IGNORED = ("vision_tower.", "mm_projector.")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded folder."""

    policy: Policy
    tokenizer: PreTrainedTokenizerFast
    stage: StageRecord


def save_checkpoint(
    folder: str | Path,
    weights: Weights,
    config: PolicyConfig,
    tokenizer: PreTrainedTokenizerFast,
    stage: StageRecord,
) -> Path:
    """Write a checkpoint folder, replacing one of the same name; returns its path.

    ``weights`` are all parameters and persistent buffers under their names in memory, in their
    own dtypes; an iterator is consumed one shard at a time. ValueError when it is not the whole
    policy.
    """
    folder = Path(folder)
    check_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f".{folder.name}.partial"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    dtype = _write_weights(temporary, weights, config)
    tokenizer.save_pretrained(temporary)
    fields = config.to_dict() | {
        "architectures": [ARCHITECTURE],
        "dtype": str(dtype).removeprefix("torch."),
        "max_position_embeddings": stage.context,
        "bos_token_id": tokenizer.bos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.backend_tokenizer.token_to_id(END_OF_MESSAGE),
    }
    write_json(temporary / "config.json", fields)
    write_json(temporary / STAGE_FILE, asdict(stage))
    for file in temporary.iterdir():
        _flush(file)
    _flush(temporary)
    if folder.exists():
        old = folder.parent / f".{folder.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        temporary.rename(folder)
        shutil.rmtree(old)
    else:
        temporary.rename(folder)
    _flush(folder.parent)
    return folder


def load_checkpoint(folder: str | Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Read a checkpoint folder; parameters get ``dtype``, thresholds stay fp32.

    Raises `UserError` in one line for whatever is missing, unknown, torn or of the wrong shape.
    """
    folder = Path(folder)
    config = read_config(folder)
    tokenizer = load_tokenizer(folder)
    stage = read_stage(folder)
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has {len(tokenizer)} tokens, config.json says "
            f"vocab_size={config.vocab_size}"
        )
    digest = tokenizer_sha256(tokenizer)
    if stage.tokenizer_sha256 not in ("", digest):
        raise UserError(
            f"{folder}: tokenizer.json is not the one the policy was trained with "
            f"(its digest differs from {STAGE_FILE})"
        )
    return Checkpoint(load_policy(folder, dtype), tokenizer, stage)


def load_policy(folder: str | Path, dtype: torch.dtype = torch.float32) -> Policy:
    """Only the policy of a folder; errors as `load_checkpoint`."""
    folder = Path(folder)
    with torch.device("meta"):
        policy = Policy(read_config(folder))
    policy.load_state_dict(_read_weights(folder, policy, dtype), assign=True)
    return policy.eval()


def save_policy(folder: str | Path, policy: Policy) -> None:
    """Config and weights alone, for tools that need no more; not atomic, an existing folder is
    written into."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = _write_weights(folder, policy, policy.config)
    write_json(
        folder / "config.json",
        policy.config.to_dict()
        | {"architectures": [ARCHITECTURE], "dtype": str(dtype).removeprefix("torch.")},
    )


def check_replaceable(folder: Path) -> None:
    """Refuse to put a checkpoint in the place of anything but a checkpoint."""
    if (
        folder.exists()
        and not (folder / "config.json").is_file()
        and (not folder.is_dir() or any(folder.iterdir()))
    ):
        raise UserError(f"output {folder}: exists and is no checkpoint; choose another output")


def file_names(name: str, shape: Iterable[int]) -> list[str]:
    """Under which names the tensor called ``name`` in memory is stored."""
    fused = _FUSED.fullmatch(name)
    if fused is None:
        return [name]
    return [f"{fused[1]}.{expert}.{fused[2]}.weight" for expert in range(next(iter(shape)))]


def _write_weights(folder: Path, weights: Weights, config: PolicyConfig) -> torch.dtype:
    """Write shards of at most `SHARD_BYTES` and their index; the dtype of most tensors."""
    if isinstance(weights, Policy):
        weights = weights.state_dict()
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in Policy(config).state_dict().items()}
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    total = size = 0
    dtype = torch.float32
    for name, tensor in pairs:
        if tensor.shape != expected.pop(name, None):
            raise ValueError(
                f"checkpoint: {name} {list(tensor.shape)} is not a tensor of the "
                "policy, has another shape or comes twice"
            )
        if name.endswith("embed_tokens.weight"):
            dtype = tensor.dtype
        for stored, part in _stored(name, tensor, config):
            if shard and size + part.nbytes > SHARD_BYTES:
                shards.append(_save_shard(folder, len(shards), shard))
                shard, size = {}, 0
            shard[stored] = part
            size += part.nbytes
            total += part.nbytes
    if expected:
        raise ValueError(f"checkpoint: tensors missing: {listed(sorted(expected))}")
    shards.append(_save_shard(folder, len(shards), shard))
    if len(shards) == 1:
        (folder / _part(0)).rename(folder / "model.safetensors")
        return dtype
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        final = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / _part(number)).rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return dtype


def _stored(name: str, tensor: Tensor, config: PolicyConfig) -> Iterator[tuple[str, Tensor]]:
    """The tensors in the file that hold ``tensor``; copies of their own on the CPU."""
    tensor = tensor.detach()
    names = file_names(name, tensor.shape)
    if _FUSED.fullmatch(name):
        yield from zip(names, (part.cpu().clone() for part in tensor), strict=True)
        return
    if name.endswith(_THRESHOLD):
        tensor = tensor.float()
    if name.endswith("A_log") and config.gate_lower_bound is None:
        tensor = tensor.view(1, 1, -1, 1)  # as Kimi-Linear publishes it
    yield name, tensor.cpu().contiguous().clone()


def _save_shard(folder: Path, number: int, tensors: dict[str, Tensor]) -> list[str]:
    save_file(tensors, folder / _part(number), metadata={"format": "pt"})
    return list(tensors)


def _part(number: int) -> str:
    return f"part-{number}.safetensors"


def _read_weights(folder: Path, policy: Policy, dtype: torch.dtype) -> dict[str, Tensor]:
    """A state dict for ``policy``, filled tensor by tensor from the files of ``folder``."""
    weights: dict[str, Tensor] = {}
    wrong: list[str] = []
    with ExitStack() as stack:
        stored = _open_shards(folder, stack)
        expected = policy.state_dict()
        names = {name: file_names(name, tensor.shape) for name, tensor in expected.items()}
        wanted = {part for parts in names.values() for part in parts}
        missing = sorted(wanted - stored.keys())
        extra = sorted(name for name in stored.keys() - wanted if not name.startswith(_IGNORED))
        if missing or extra:
            problems = [
                f"tensors {kind}: {listed(found)}"
                for kind, found in (("missing", missing), ("unknown", extra))
                if found
            ]
            raise UserError(f"{folder}: {'; '.join(problems)}")
        for name, parts in names.items():
            shape = expected[name].shape
            kind = torch.float32 if name.endswith(_THRESHOLD) else dtype
            target = torch.empty(shape, dtype=kind)
            for part, place in zip(
                parts, target if len(parts) > 1 or _FUSED.fullmatch(name) else [target], strict=True
            ):
                file, stored_name = stored[part]
                try:
                    value = _unpadded(part, file.get_tensor(stored_name), place.shape)
                except SafetensorError as error:
                    raise UserError(f"{folder}: {part}: {one_line(error)}") from None
                if value.shape != place.shape:
                    wrong.append(f"{part} {list(value.shape)} instead of {list(place.shape)}")
                else:
                    place.copy_(value)
            weights[name] = target
    if wrong:
        raise UserError(f"{folder}: tensors of the wrong shape: {listed(wrong)}")
    return weights


def _unpadded(name: str, value: Tensor, shape: torch.Size) -> Tensor:
    """Published ``A_log`` is ``[1, 1, H, 1]`` or zero-padded; here it is ``[H]``."""
    if not name.endswith("A_log"):
        return value
    value = value.flatten()
    heads = shape[0]
    return value[:heads] if not bool(value[heads:].any()) else value


def _open_shards(folder: Path, stack: ExitStack) -> dict[str, tuple[Any, str]]:
    """The open file and stored name of every tensor, by its name without prefix."""
    index = folder / INDEX_FILE
    weight_map: dict[str, str] = {}
    files = ["model.safetensors"]
    if index.is_file():
        weight_map = read_json(index).get("weight_map", {})
        files = sorted(set(weight_map.values()))
        if not files or any(Path(name).name != name for name in files):
            raise UserError(f"{index}: weight_map does not name files of this folder")
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise UserError(f"{folder}: files missing: {listed(absent)}")
    stored: dict[str, tuple[Any, str]] = {}
    for name in files:
        try:
            file = stack.enter_context(safe_open(folder / name, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise UserError(f"{folder / name}: damaged or truncated ({one_line(error)})") from None
        stored |= {key.removeprefix(_PREFIX): (file, key) for key in file.keys()}  # noqa: SIM118
    lost = sorted({key.removeprefix(_PREFIX) for key in weight_map} - stored.keys())
    if lost:
        raise UserError(f"{index}: tensors missing in the shards: {listed(lost)}")
    return stored


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
