"""Checkpoint folders in the published layout, with the context they were trained for.

A folder holds ``config.json``, ``model.safetensors`` (or shards with an index), the tokenizer,
``stage.json``, and ``value.safetensors`` if the policy has a value head. Tensors carry the
published names, one per expert; in memory the experts of a layer are one tensor. Nothing is ever
unpickled.

A folder is written beside its place and renamed into it: a reader finds a whole checkpoint or
none. Every tensor of the configured policy must be there with its shape, in memory as in files:
a threshold that is missing is an error, never zeros.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ..configs.errors import UserError
from .config import PolicyConfig
from .model import Policy
from .published import saved_fields
from .records import STAGE_FILE, StageRecord, listed, read_config, read_stage, write_json
from .shards import INDEX_FILE, SINGLE_FILE, write_shard
from .stored import read_weights, stored_parts
from .tokenizer import END_OF_MESSAGE, load_tokenizer, tokenizer_sha256
from .value import VALUE_PREFIX, read_value_head, write_value_head

SHARD_BYTES = 4 * 10**9

Weights = Policy | Mapping[str, Tensor] | Iterator[tuple[str, Tensor]]


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
    *,
    export: bool = False,
) -> Path:
    """Write a checkpoint folder, replacing one of the same name; returns its path.

    ``weights`` are all parameters and persistent buffers under their names in memory, in their
    own dtypes; an iterator is consumed one shard at a time. With ``export`` routed experts are
    stored as MXFP4, else as they are, and a value head is left out. ValueError when it is not the
    whole policy.
    """
    folder = Path(folder)
    check_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f".{folder.name}.partial"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    dtype = _write_weights(temporary, weights, config, export)
    tokenizer.save_pretrained(temporary)
    changes = {
        "max_position_embeddings": stage.context,
        "bos_token_id": tokenizer.bos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.backend_tokenizer.token_to_id(END_OF_MESSAGE),
    }
    write_json(temporary / "config.json", saved_fields(config.to_dict(), changes, dtype, export))
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
    """Read a checkpoint folder; parameters get ``dtype``, thresholds are fp32, and the gates and
    convolutions that are published in fp32 are never made narrower.

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


def load_policy(folder: str | Path, dtype: torch.dtype | None = None) -> Policy:
    """Only the policy of a folder, where ``dtype`` is None with the bits of its files; errors as
    `load_checkpoint`. Experts that are stored as MXFP4 are bfloat16 then, which holds them."""
    folder = Path(folder)
    with torch.device("meta"):
        policy = Policy(read_config(folder))
    policy.load_state_dict(read_weights(folder, policy, dtype), assign=True)
    policy.v_head = read_value_head(folder, policy.config.hidden_size)
    return policy.eval()


def save_policy(folder: str | Path, policy: Policy, *, export: bool = False) -> None:
    """Config and weights alone, for tools that need no more; not atomic, an existing folder is
    written into. ``export`` as in `save_checkpoint`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = _write_weights(folder, policy, policy.config, export)
    fields = saved_fields(policy.config.to_dict(), {}, dtype, export)
    write_json(folder / "config.json", fields)


def check_replaceable(folder: Path) -> None:
    """Refuse to put a checkpoint in the place of anything but a checkpoint."""
    if (
        folder.exists()
        and not (folder / "config.json").is_file()
        and (not folder.is_dir() or any(folder.iterdir()))
    ):
        raise UserError(f"output {folder}: exists and is no checkpoint; choose another output")


def _write_weights(folder: Path, weights: Weights, config: PolicyConfig, export: bool) -> str:
    """Write shards of at most `SHARD_BYTES` and their index; the dtype of most tensors."""
    if isinstance(weights, Policy):
        weights = weights.state_dict()
    lasting = isinstance(weights, Mapping)  # what an iterator gives is valid until its next
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in Policy(config).state_dict().items()}
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    total = size = 0
    dtype = "float32"
    head: dict[str, Tensor] = {}
    for name, tensor in pairs:
        if name.startswith(VALUE_PREFIX):
            head[name] = tensor if lasting else tensor.clone()
            continue
        if tensor.shape != expected.pop(name, None):
            raise ValueError(
                f"checkpoint: {name} {list(tensor.shape)} is not a tensor of the "
                "policy, has another shape or comes twice"
            )
        if name.endswith("embed_tokens.weight"):
            dtype = str(tensor.dtype).removeprefix("torch.")
        for stored, part in stored_parts(name, tensor, config, export):
            if shard and size + part.nbytes > SHARD_BYTES:
                write_shard(folder / _part(len(shards)), shard)
                shards.append(list(shard))
                shard, size = {}, 0
            shard[stored] = part if lasting else part.clone()
            size += part.nbytes
            total += part.nbytes
    if expected:
        raise ValueError(f"checkpoint: tensors missing: {listed(sorted(expected))}")
    write_shard(folder / _part(len(shards)), shard)
    shards.append(list(shard))
    write_value_head(folder, {} if export else head, config.hidden_size)
    for stale in (*folder.glob("model-*.safetensors"), folder / INDEX_FILE, folder / SINGLE_FILE):
        stale.unlink(missing_ok=True)
    if len(shards) == 1:
        (folder / _part(0)).rename(folder / SINGLE_FILE)
        return dtype
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        final = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / _part(number)).rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return dtype


def _part(number: int) -> str:
    return f"part-{number}.safetensors"


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
