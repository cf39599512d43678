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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ..configs.errors import UserError
from .carried import has_tower
from .config import PolicyConfig
from .model import Policy
from .published import saved_fields
from .records import (
    CONFIG_FILE,
    PREPROCESSOR_FILE,
    STAGE_FILE,
    StageRecord,
    listed,
    one_line,
    read_config,
    read_stage,
    stage_fields,
    write_json,
)
from .shards import (
    FLOATS,
    INDEX_FILE,
    SINGLE_FILE,
    check_finite,
    check_storable,
    write_shard,
)
from .stored import file_notes, read_weights, stored_parts
from .tokenizer import END_OF_MESSAGE, MEDIA_PAD, load_tokenizer, tokenizer_sha256
from .value import VALUE_FILE, VALUE_PREFIX, read_value_head, write_value_head

SHARD_BYTES = 4 * 10**9
_WEIGHT_FILES = ("model-*.safetensors", SINGLE_FILE, INDEX_FILE, VALUE_FILE)

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
    notes: Mapping[str, str] | None = None,
) -> Path:
    """Write a checkpoint folder, replacing one of the same name; returns its path.

    ``weights`` are all parameters and persistent buffers under their names in memory, in their
    own dtypes; an iterator is consumed one shard at a time. With ``export`` routed experts are
    stored as MXFP4, else as they are, and a value head is left out. ``notes`` are texts by file
    name that belong to it. ValueError when it is not the whole policy.
    """
    given = folder = Path(folder)
    check_replaceable(folder)
    _check_ids(folder, tokenizer, config)
    folder = folder.resolve()  # what a link points to is replaced, not the link
    with _beside(folder) as temporary:
        dtype = _write_weights(temporary, weights, config, export)
        tokenizer.save_pretrained(temporary)
        changes = {
            "max_position_embeddings": stage.context,
            "bos_token_id": tokenizer.bos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.backend_tokenizer.token_to_id(END_OF_MESSAGE),
        }
        write_json(temporary / CONFIG_FILE, saved_fields(config.to_dict(), changes, dtype, export))
        write_json(temporary / STAGE_FILE, stage_fields(stage))
        _write_preprocessor(temporary, config)
        for name, text in (notes or {}).items():
            (temporary / name).write_text(text, encoding="utf-8")
    if folder.exists():
        old = folder.parent / f".{folder.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        temporary.rename(folder)
        shutil.rmtree(old)
    else:
        temporary.rename(folder)
    _flush(folder.parent)
    return given


def load_checkpoint(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    *,
    vision: bool = False,
    part: tuple[int, int] = (0, 1),
) -> Checkpoint:
    """Read a checkpoint folder; parameters get ``dtype``, thresholds are fp32, and the gates and
    convolutions that are published in fp32 are never made narrower. ``vision`` and ``part`` as in
    `load_policy`.

    Raises `UserError` in one line for whatever is missing, unknown, torn or of the wrong shape.
    """
    folder = Path(folder)
    config = read_config(folder)
    tokenizer = load_tokenizer(folder)
    stage = read_stage(folder)
    _check_ids(folder, tokenizer, config)
    digest = tokenizer_sha256(tokenizer)
    if stage.tokenizer_sha256 not in ("", digest):
        raise UserError(
            f"{folder}: tokenizer.json is not the one the policy was trained with "
            f"(its digest differs from {STAGE_FILE})"
        )
    if vision:
        _check_placeholder(folder, tokenizer, config)
    policy = load_policy(folder, dtype, vision=vision, part=part)
    return Checkpoint(policy, tokenizer, stage)


def load_policy(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    *,
    vision: bool = False,
    part: tuple[int, int] = (0, 1),
) -> Policy:
    """Only the policy of a folder, where ``dtype`` is None with the bits of its files; errors as
    `load_checkpoint`. Experts that are stored as MXFP4 are bfloat16 then, which holds them. Of each
    layer's experts only those of a ``part`` are read, number r of n equal ones, if n divides them.

    The vision tower is built only with ``vision``. Otherwise its names, shapes and dtypes are
    checked, and its tensors stay in their files, which the policy's configuration keeps open: a
    save copies them, and refuses those that are not finite.
    """
    if dtype not in (None, *FLOATS.values()):
        names = ", ".join(map(str, FLOATS.values()))
        raise UserError(f"dtype={dtype!r} must be None or one of {names}")
    folder = Path(folder)
    config = read_config(folder)
    with torch.device("meta"):
        try:
            policy = Policy(config, vision=vision)
        except (ValueError, RuntimeError) as error:  # the latter: sizes whose product torch has not
            message = one_line(error).removeprefix("config.json: ")
            raise UserError(f"{folder / 'config.json'}: {message}") from None
    policy.load_state_dict(read_weights(folder, policy, dtype, part), assign=True)
    policy.v_head = read_value_head(folder, policy.config.hidden_size)
    return policy.eval()


def save_policy(
    folder: str | Path, policy: Policy, *, export: bool = False, weights: Weights | None = None
) -> None:
    """Config and weights alone, for tools that need no more, in the place of those that are there;
    what else lies in the folder stays. ``export`` and ``weights``, by default the policy's own, as
    in `save_checkpoint`.

    Until all is written the folder is as it was. Then files are moved into it one by one, the
    configuration last: without one nothing reads the folder.
    """
    if not os.fspath(folder):
        raise UserError("save: the name of the folder is empty")
    folder, config = Path(folder).resolve(), policy.config
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is no folder; choose another one to save into")
    with _beside(folder) as temporary:
        given = policy if weights is None else weights
        dtype = _write_weights(temporary, given, config, export)
        fields = saved_fields(config.to_dict(), {}, dtype, export)
        write_json(temporary / CONFIG_FILE, fields)
        _write_preprocessor(temporary, config)
    if not folder.exists():
        temporary.rename(folder)
        _flush(folder.parent)
        return
    for pattern in (CONFIG_FILE, *_WEIGHT_FILES, PREPROCESSOR_FILE):
        for stale in folder.glob(pattern):
            stale.unlink()
    moved = sorted(temporary.iterdir(), key=lambda file: file.name == CONFIG_FILE)
    for file in moved:
        file.rename(folder / file.name)
    temporary.rmdir()
    _flush(folder)


def _check_placeholder(
    folder: Path, tokenizer: PreTrainedTokenizerFast, config: PolicyConfig
) -> None:
    """Both files must mean the same token by the placeholder of images."""
    index = tokenizer.backend_tokenizer.token_to_id(MEDIA_PAD)
    if index != config.media_token_id:
        said = f"has no {MEDIA_PAD}" if index is None else f"says {MEDIA_PAD} is {index}"
        raise UserError(
            f"{folder}: tokenizer.json {said}, config.json says "
            f"media_placeholder_token_id={config.media_token_id}"
        )


def _check_ids(folder: Path, tokenizer: PreTrainedTokenizerFast, config: PolicyConfig) -> None:
    """Every id must have a row of the embedding; there may be gaps between ids."""
    last = max(tokenizer.get_vocab().values(), default=-1)
    if last >= config.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has tokens up to id {last}, config.json says "
            f"vocab_size={config.vocab_size}"
        )


def check_replaceable(folder: Path) -> None:
    """Refuse to put a checkpoint in the place of anything but a checkpoint, which has no folders
    inside: those are a run's, its stages or what it goes on from."""
    if not folder.exists():
        return
    if folder.samefile("."):
        raise UserError(f"output {folder}: is the current folder; choose another output")
    inside = list(folder.iterdir()) if folder.is_dir() else [folder]
    if inside and not (folder / CONFIG_FILE).is_file():
        raise UserError(f"output {folder}: exists and is no checkpoint; choose another output")
    for path in inside:
        if path.is_dir() or path.name == "run.json":
            raise UserError(f"output {folder}: holds {path.name} of a run; choose another output")


@contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """An empty folder beside ``folder`` to write into, on the disk when the context ends; after an
    error it is removed."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        file = next(path for path in folder.parents if path.exists())
        raise UserError(f"{folder}: {file} is no folder; choose another one") from None
    temporary = folder.parent / f".{folder.name}.partial"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.iterdir():
            _flush(file)
        _flush(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # a full disk wants its space back
        raise


def _write_weights(folder: Path, weights: Weights, config: PolicyConfig, export: bool) -> str:
    """Write shards of at most `SHARD_BYTES` and their index; the dtype of most tensors."""
    if export:
        config.check_packing("to be exported")
    if isinstance(weights, Policy):
        weights = weights.state_dict()
    lasting = isinstance(weights, Mapping)  # what an iterator gives is valid until its next
    pairs = iter(weights.items()) if isinstance(weights, Mapping) else weights
    head: dict[str, Tensor] = {}

    def rest() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in pairs:
            check_storable(name, tensor)
            if name.startswith(VALUE_PREFIX):
                head[name] = tensor if lasting else tensor.clone()
            else:
                yield name, tensor

    parts = _parts(rest(), config, export)
    notes = file_notes(config)
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    total = size = 0
    dtype = "float32"
    for stored, part in parts:
        if stored.endswith("embed_tokens.weight"):
            dtype = str(part.dtype).removeprefix("torch.")
        if shard and size + part.nbytes > SHARD_BYTES:
            write_shard(folder / _part(len(shards)), shard, notes)
            shards.append(list(shard))
            shard, size = {}, 0
        shard[stored] = part if lasting else part.clone()
        size += part.nbytes
        total += part.nbytes
    write_shard(folder / _part(len(shards)), shard, notes)
    shards.append(list(shard))
    write_value_head(folder, {} if export else head, config.hidden_size)
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


def _parts(
    pairs: Iterator[tuple[str, Tensor]], config: PolicyConfig, export: bool
) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the files: those of ``pairs``, and a vision tower that is not among them."""
    expected = _shapes(config, vision=False)
    built = False
    for name, tensor in pairs:
        if not built and has_tower([name]) and config.vision is not None:
            built = True
            whole = _shapes(config, vision=True)
            expected |= {name: shape for name, shape in whole.items() if has_tower([name])}
        if tensor.shape != expected.pop(name, None):
            raise ValueError(
                f"checkpoint: {name} {list(tensor.shape)} is not a tensor of the "
                "policy, has another shape or comes twice"
            )
        for stored, part in stored_parts(name, tensor, config, export):
            yield stored, part.cpu()
    if expected:
        raise ValueError(f"checkpoint: tensors missing: {listed(sorted(expected))}")
    if config.carried_tower is not None and not built:
        for stored, tensor in config.carried_tower:
            check_finite(stored, tensor)
            yield stored, tensor
    elif config.vision is not None and not built:
        raise UserError(
            "checkpoint: config.json has a vision_config, but the policy was made without a vision "
            "tower; make it with vision=True, or without a vision_config"
        )


def _shapes(config: PolicyConfig, vision: bool) -> dict[str, torch.Size]:
    with torch.device("meta"):
        state = Policy(config, vision=vision).state_dict()
    return {name: tensor.shape for name, tensor in state.items()}


def _write_preprocessor(folder: Path, config: PolicyConfig) -> None:
    """The rules for images as they were read, or as they hold for a new policy."""
    rules = config.image_rules if config.carried_tower is None else None
    if config.preprocessor is not None:
        write_json(folder / PREPROCESSOR_FILE, dict(config.preprocessor))
    elif rules is not None:
        write_json(folder / PREPROCESSOR_FILE, rules.published())


def _part(number: int) -> str:
    return f"part-{number}.safetensors"


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
