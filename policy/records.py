"""What a checkpoint folder says of itself: ``config.json`` and ``stage.json``."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from ..configs.errors import UserError
from ..envs.types import Effort
from .config import PolicyConfig
from .published import text_fields

CONFIG_FILE = "config.json"
STAGE_FILE = "stage.json"
PREPROCESSOR_FILE = "preprocessor_config.json"
EFFORTS: list[str] = [*get_args(Effort)]

# Without these a file would silently get the size or the function of another policy.
_REQUIRED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "hidden_act",
    "first_k_dense_replace",
    "moe_layer_freq",
    "num_experts",
    "num_experts_per_token",
    "num_shared_experts",
    "moe_intermediate_size",
    "routed_scaling_factor",
    "linear_attn_config",
    "max_position_embeddings",
)
# Kimi-Linear, which is all "silu", has none of these; a policy with SiTU says each of them.
_REQUIRED_WITH_SITU = (
    "mla_use_output_gate",
    "latent_moe_use_norm",
    "activation_situ_beta",
    "activation_situ_linear_beta",
)
_REQUIRED_KEYS = ("q_lora_rank",)  # null is a value
_REQUIRED_KEYS_WITH_SITU = ("attn_res_block_size", "routed_expert_hidden_size")
_LINEAR_KEYS_WITH_SITU = ("gate_lower_bound", "use_full_rank_gate")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


_STAGE_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "context": ("a whole number of at least 0", _is_count),
    "stages": ("a list of whole numbers", lambda v: isinstance(v, list) and all(map(_is_count, v))),
    "tokens_seen": ("a whole number of at least 0", _is_count),
    "tokenizer_sha256": ("a text", lambda v: isinstance(v, str)),
    "parent": ("a text or null", lambda v: v is None or isinstance(v, str)),
}


@dataclass(frozen=True, slots=True)
class ChatRecord:
    """Of a policy that speaks the full chat style: whether it thinks, and the effort that it is
    asked for at the start of an episode, if any."""

    thinking: bool = True
    effort: Effort | None = None


@dataclass(frozen=True, slots=True)
class StageRecord:
    """What a policy has been trained for: ``stage.json``.

    ``context`` is the longest sequence in tokens it may be run on, ``stages`` the contexts it
    went through, ``parent`` the folder it was made from, ``chat`` how it speaks, where its
    tokenizer does not say it all. Example: ``StageRecord(65536, (8192,
    65536), 2_000_000, "0b1c...", "runs/stage")``.
    """

    context: int
    stages: tuple[int, ...]
    tokens_seen: int
    tokenizer_sha256: str
    parent: str | None = None
    chat: ChatRecord | None = None


def read_config(folder: str | Path) -> PolicyConfig:
    """The configuration of a checkpoint folder; a field that decides what the policy computes
    must be there."""
    file = Path(folder) / CONFIG_FILE
    if not Path(folder).is_dir():
        raise UserError(f"{folder}: no such checkpoint folder")
    config = parse_config(file, read_json(file))
    preprocessor = read_preprocessor(folder)
    try:
        config.remember_preprocessor(preprocessor)
    except ValueError as error:
        message = one_line(error).removeprefix(f"{PREPROCESSOR_FILE}: ")
        raise UserError(f"{Path(folder) / PREPROCESSOR_FILE}: {message}") from None
    return config


def read_preprocessor(folder: str | Path) -> dict[str, Any] | None:
    """``preprocessor_config.json``, if the folder has one."""
    file = Path(folder) / PREPROCESSOR_FILE
    return read_json(file) if file.is_file() else None


def parse_config(file: Path, fields: dict[str, Any]) -> PolicyConfig:
    """The configuration that ``fields``, the content of ``file``, describe."""
    try:
        missing = missing_fields(text_fields(fields))
        config = None if missing else PolicyConfig.from_dict(fields)
    except (ValueError, TypeError, KeyError) as error:
        message = one_line(error).removeprefix("config.json: ")
        raise UserError(f"{file}: {message}") from None
    if config is None:
        raise UserError(f"{file}: missing {listed(missing)}")
    return config


def missing_fields(fields: dict[str, Any]) -> list[str]:
    """What text fields leave open that changes the size or the function of the policy."""
    situ = fields.get("hidden_act") == "situ"
    needed = (*_REQUIRED_FIELDS, *(_REQUIRED_WITH_SITU if situ else ()))
    missing = [name for name in needed if fields.get(name) is None]
    keys = (*_REQUIRED_KEYS, *(_REQUIRED_KEYS_WITH_SITU if situ else ()))
    missing += [name for name in keys if name not in fields]
    linear = fields.get("linear_attn_config")
    if situ and isinstance(linear, dict):
        missing += [
            f"linear_attn_config.{name}" for name in _LINEAR_KEYS_WITH_SITU if name not in linear
        ]
    return missing


def read_stage(folder: str | Path) -> StageRecord:
    """``stage.json``; where it is absent, ``max_position_embeddings`` is the trained context. Where
    both say it they must agree."""
    file = Path(folder) / STAGE_FILE
    if not file.is_file():
        return StageRecord(read_config(folder).max_position_embeddings, (), 0, "")
    fields = read_json(file)
    missing = _STAGE_FIELDS.keys() - fields.keys()
    if missing:
        raise UserError(f"{file}: missing {listed(sorted(missing))}")
    for name, (wanted, fits) in _STAGE_FIELDS.items():
        if not fits(fields[name]):
            raise UserError(f"{file}: {name}={fields[name]!r} must be {wanted}")
    known: dict[str, Any] = {name: fields[name] for name in _STAGE_FIELDS}
    known["stages"] = tuple(fields["stages"])
    known["chat"] = _read_chat(file, fields.get("chat"))
    record = StageRecord(**known)
    config = Path(folder) / CONFIG_FILE
    said = read_config(folder).max_position_embeddings if config.is_file() else record.context
    if said != record.context:
        raise UserError(
            f"{file}: context={record.context}, but {config.name} beside it says "
            f"max_position_embeddings={said}; correct the one that is wrong"
        )
    return record


def _read_chat(file: Path, fields: Any) -> ChatRecord | None:
    if fields is None:
        return None
    if not isinstance(fields, dict) or fields.keys() != {"thinking", "effort"}:
        raise UserError(f"{file}: chat must be null or hold thinking and effort")
    thinking, effort = fields["thinking"], fields["effort"]
    if not isinstance(thinking, bool):
        raise UserError(f"{file}: chat.thinking={thinking!r} must be true or false")
    if effort not in (None, *EFFORTS):
        raise UserError(f"{file}: chat.effort={effort!r} must be null or one of {listed(EFFORTS)}")
    if effort is not None and not thinking:
        raise UserError(
            f"{file}: chat.effort={effort} needs chat.thinking true; correct one of them"
        )
    return ChatRecord(thinking, effort)


def stage_fields(record: StageRecord) -> dict[str, Any]:
    """What ``stage.json`` holds; of ``chat`` nothing where there is nothing to say."""
    fields = asdict(record)
    return fields if record.chat is not None else {n: v for n, v in fields.items() if n != "chat"}


def check_context(folder: str | Path, context: int, allow_longer: bool) -> None:
    """Refuse to run a checkpoint on more tokens than it was trained for."""
    trained = read_stage(folder).context
    if context > trained and not allow_longer:
        raise UserError(
            f"context={context} is longer than the {trained} tokens that {folder} was "
            "trained for; lower it, train a longer stage, or, in train and eval, set "
            "allow_longer_context=true"
        )


def read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise UserError(f"{file.parent}: {file.name} is missing")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # the latter: brackets in brackets
        raise UserError(f"{file}: not JSON ({one_line(error)})") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None
    if not isinstance(content, dict):
        raise UserError(f"{file}: expected a JSON object")
    return content


def write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def listed(names: list[str], limit: int = 6) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())
