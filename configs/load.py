"""Read a config: YAML file or preset, dotted overrides on top, checked against a typed schema.

Values are converted by OmegaConf. Files hold plain data only: interpolations, resolvers, YAML
tags and anchors are refused, so that reading somebody else's config never runs or reads anything.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, make_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .errors import UserError

PRESETS = Path(__file__).parent

# Plain texts that YAML 1.1 may read as numbers: 010 as octal, 1:30 in base 60 (but not 09:30).
_ODD_NUMBER = re.compile(r"[-+]?(0[0-7_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
_CONTENT_TOKENS = (
    *(yaml.ValueToken, yaml.ScalarToken),
    *(yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken),
)
_PATHS = ("output", "policy", "reference")  # where ~ is the home folder, which few shells put there
_CUTS = (  # what engines call the filters and penalties that change the distribution they sample
    *("top_p", "top_k", "top_a", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "tfs"),
    *("top_n_sigma", "xtc_probability", "xtc_threshold", "mirostat", "penalty_alpha"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size"),
    *("length_penalty", "logit_bias", "logits_processors", "bad_words", "bad_words_ids"),
    *("allowed_token_ids", "suppress_tokens", "begin_suppress_tokens", "ignore_eos"),
    *("min_tokens", "min_new_tokens", "min_length", "num_beams", "use_beam_search", "best_of"),
)
_STOPS = ("stop", "stop_sequences", "stop_strings", "stop_words", "stop_token_ids", "eos_token_id")

_PLURAL = {int: "whole numbers", float: "numbers", bool: "true or false", str: "texts"}

C = TypeVar("C")
Data = dict[str, Any]


def load_config(schema: type[C], source: str | None, overrides: list[str]) -> C:
    """Build a `schema` instance from a file or preset and ``key=value`` overrides.

    A preset is named by its path under ``configs/`` without suffix (``train/quickstart``); the
    folder may be left out where the schema implies it (``quickstart`` for a `TrainConfig`).
    Every mistake is a `UserError` naming the full key and where it came from.
    """
    data: Data = {}
    if source is not None:
        path = find_config(schema, source)
        data = _parse(_read(path), f"in {path}")
        _build(schema, data, "", f"in {path}", partial=True)
    where = f"in {source} or on the command line" if source else "on the command line"
    return _override(schema, data, overrides, where)


def parse_config(schema: type[C], text: str, where: str) -> C:
    """Build a `schema` instance from YAML text such as `dump_config` gives."""
    return _build(schema, _parse(text, where), "", where, partial=False)


def check_overrides(schema: type, overrides: list[str]) -> None:
    """Refuse unknown keys and wrong values without asking for what else the schema needs."""
    data: Data = {}
    for text in overrides:
        _assign(data, *_split_override(text))
    _build(schema, data, "", "on the command line", partial=True)


def override_config(config: C, overrides: list[str]) -> C:
    """A copy of `config` with ``key=value`` overrides applied and checked."""
    return _override(type(config), _plain(config), overrides, "on the command line")


def dump_config(config: Any) -> str:
    """YAML text that `load_config` turns into an equal config."""
    return OmegaConf.to_yaml(OmegaConf.create(_plain(config)))


def config_keys(path: Path) -> set[str]:
    """The keys at the top of a config file, whatever kind it is."""
    return set(_parse(_read(path), f"in {path}"))


def find_config(schema: type, source: str) -> Path:
    """The file that `source` names: a path, or a preset of the kind that `schema` implies."""
    kind = schema.__name__.removesuffix("Config").lower()
    presets = [PRESETS / f"{source}.yaml", PRESETS / kind / f"{source}.yaml"]
    for path in [Path(source), *presets]:
        if os.path.isfile(path):  # asks without an exception whatever the name is
            return path
    names = sorted(p.stem for p in (PRESETS / kind).glob("*.yaml"))
    near = difflib.get_close_matches(source.removeprefix(f"{kind}/"), names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"presets: {', '.join(names) or 'none'}"
    raise UserError(f"config {source}: no such file or {kind} preset; {hint}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"config {path}: byte {error.start} is no UTF-8 text") from None
    except OSError as error:
        raise UserError(f"config {path}: cannot be read ({error.strerror})") from None


def _override(schema: type[C], data: Data, overrides: list[str], where: str) -> C:
    for text in overrides:
        key, value = _split_override(text)
        _assign(data, key, value)
        _build(schema, data, "", "on the command line", partial=True)
    return _build(schema, data, "", where, partial=False)


def _split_override(text: str) -> tuple[str, Any]:
    key, sep, value = text.partition("=")
    if not sep or not re.fullmatch(r"\w+(\.\w+)*", key):
        raise UserError(f"override {text!r} is not of the form key=value")
    document = f"value: {value}"
    read = _parse(document, f"for {key} on the command line")["value"]
    end = max(t.end_mark.index for t in _scan(document) if isinstance(t, _CONTENT_TOKENS))
    if comment := document[end:].strip():
        raise UserError(
            f"{key} on the command line: YAML takes {comment!r} for a comment; quote it, in a "
            f"""shell as {key}="'...'\""""
        )
    return key, read


def _scan(text: str) -> Iterator[yaml.Token]:
    return yaml.scan(text, Loader=yaml.SafeLoader)


def _parse(text: str, where: str) -> Data:
    """Plain data of a YAML text; scalars as OmegaConf reads them (1e-6 is a number)."""
    try:
        for token in _scan(text):
            if isinstance(token, yaml.TagToken | yaml.AnchorToken | yaml.AliasToken):
                kind = type(token).__name__.removesuffix("Token").lower()
                line = token.start_mark.line + 1
                raise UserError(f"YAML {kind} {where}, line {line}: only plain values are allowed")
            if isinstance(token, yaml.ScalarToken) and token.plain:
                _refuse_odd_number(token, where)
        config = OmegaConf.create(text)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise UserError(f"invalid YAML {where}{line}: {problem}") from None
    except OmegaConfBaseException as error:
        raise UserError(f"invalid value {where}: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise UserError(f"invalid YAML {where}: it is nested too deeply") from None
    data = OmegaConf.to_container(config, resolve=False)
    if not isinstance(data, dict):
        raise UserError(f"config {where}: expected key: value lines, found a {type(data).__name__}")
    _refuse_interpolations(data, "", where)
    return {str(key): value for key, value in data.items()}


def _refuse_odd_number(token: yaml.ScalarToken, where: str) -> None:
    read = yaml.safe_load(token.value) if _ODD_NUMBER.fullmatch(token.value) else ""
    if not isinstance(read, str):
        shell = f""", in a shell as "'{token.value}'\"""" if "on the command line" in where else ""
        raise UserError(
            f"{token.value} {where}, line {token.start_mark.line + 1}: YAML reads it as {read}; "
            f"write {read}, or quote it{shell}"
        )


def _refuse_interpolations(value: Any, key: str, where: str) -> None:
    if isinstance(value, str) and "${" in value:
        raise UserError(f"{key} {where}: interpolation {value!r} is not allowed; write the value")
    items = value.items() if isinstance(value, dict) else ()
    for name, item in enumerate(value) if isinstance(value, list) else items:
        _refuse_interpolations(name, f"{key}.{name}".lstrip("."), where)
        _refuse_interpolations(item, f"{key}.{name}".lstrip("."), where)


def _assign(data: Data, key: str, value: Any) -> None:
    """Set `key` of nested plain data; list items are addressed by index (``stages.0.steps``)."""
    *parents, last = key.split(".")
    node: Any = data
    for name in parents:
        if isinstance(node, list):
            node = node[_index(node, name, key)]
        else:
            if node.get(name) is None:
                node[name] = {}
            node = node[name]
        if not isinstance(node, dict | list):
            raise UserError(f"{key} on the command line: {name} is a value, it has no parts")
    if isinstance(node, list):
        node[_index(node, last, key)] = value
    else:
        node[last] = value


def _index(items: list[Any], name: str, key: str) -> int:
    if not name.isdecimal() or int(name) >= len(items):
        raise UserError(f"{key} on the command line: {name} is no index below {len(items)}")
    return int(name)


def _build(schema: type[C], data: Any, key: str, where: str, *, partial: bool) -> C:
    """An instance of `schema`; with `partial` missing keys pass and the result is not built."""
    if not isinstance(data, Mapping):
        raise UserError(f"{key} {where}: expected {schema.__name__} keys, got {data!r}")
    hints = get_type_hints(schema)
    known = {field.name: field for field in fields(schema)}  # pyright: ignore[reportArgumentType]
    values: Data = {}
    for name, value in data.items():
        full = f"{key}.{name}".lstrip(".")
        if name not in known:
            raise UserError(_unknown(str(name), full, list(known), where))
        if value == "???":  # to be given by whoever uses the file
            continue
        values[name] = _convert(name, hints[name], value, full, where, partial)
    for name, field in known.items():
        if not partial and name not in values and _required(field):
            raise UserError(f"{f'{key}.{name}'.lstrip('.')} is missing: give it {where}")
    return values if partial else schema(**values)  # pyright: ignore[reportReturnType]


def _convert(name: str, hint: Any, value: Any, key: str, where: str, partial: bool) -> Any:
    """`value` as the field's type: nested dataclasses here, leaves by OmegaConf."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None and NoneType in options:
        return None
    inner = next(option for option in options if option is not NoneType)
    if is_dataclass(inner):
        return _build(inner, value, key, where, partial=partial)  # pyright: ignore[reportArgumentType]
    items = get_args(inner)
    if get_origin(inner) is tuple and is_dataclass(items[0]) and isinstance(value, list | tuple):
        return tuple(
            _build(items[0], item, f"{key}.{i}", where, partial=partial)  # pyright: ignore[reportArgumentType]
            for i, item in enumerate(value)
        )
    if inner is str:
        _refuse_bare(value, key, where)
    elif get_origin(inner) is tuple and str in items and isinstance(value, list | tuple):
        for item in value:
            _refuse_bare(item, key, where)
            if not isinstance(item, str):  # OmegaConf would take the text of it
                raise UserError(f"{key} {where}: {item!r} is not text")
    elif inner is bool and isinstance(value, int | float) and not isinstance(value, bool):
        raise UserError(f"{key} {where}: {value!r} is not {_describe(hint)}")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(_alone(name, hint)), {name: value})
        result = OmegaConf.to_container(merged, resolve=False, throw_on_missing=False)
    except (OmegaConfBaseException, TypeError):  # TypeError: an object where a list belongs
        way_out = f"; write {key}=[{value}]" if str in items and isinstance(value, str) else ""
        raise UserError(f"{key} {where}: {value!r} is not {_describe(hint)}{way_out}") from None
    leaf = result[name]  # pyright: ignore[reportCallIssue, reportArgumentType, reportOptionalSubscript]
    if name in _PATHS and isinstance(leaf, str):
        return os.path.expanduser(leaf)
    return tuple(leaf) if get_origin(inner) is tuple else leaf


@cache
def _alone(name: str, hint: Any) -> type:
    """A dataclass of one field: for one value OmegaConf builds all fields of its class."""
    return make_dataclass(f"Alone_{name}", [(name, hint)])


def _refuse_bare(value: Any, key: str, where: str) -> None:
    """UserError where YAML reads the text that was meant as something else: 007 as 7, off as no."""
    if isinstance(value, bool | int | float):
        kind = "true or false" if isinstance(value, bool) else "a number"
        shell = f""", in a shell as {key}="'...'" """ if "on the command line" in where else ""
        raise UserError(f"{key} {where}: {value} is {kind}, not text; quote it{shell}".rstrip())


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _unknown(name: str, key: str, known: list[str], where: str) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    prefix = key.removesuffix(name)
    if name in _CUTS and "temperature" in known:
        return (
            f"unknown key {key} {where}: rollout samples from the whole distribution, which is the "
            f"one that the learner scores; leave it out, or set {prefix}temperature"
        )
    if name in _STOPS and "max_turn_tokens" in known:
        return (
            f"unknown key {key} {where}: a turn ends where the policy ends its message, which the "
            f"learner scores like any token; leave it out, or set {prefix}max_turn_tokens"
        )
    hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(known)}"
    return f"unknown key {key} {where}; {hint}"


def _describe(hint: Any) -> str:
    options = get_args(hint)
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, options))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join("null" if o is NoneType else _describe(o) for o in options)
    if get_origin(hint) is dict:
        return "an object such as {key: value}"
    if get_origin(hint) is tuple:
        items = get_args(hint)
        count = "" if items[-1] is Ellipsis else f"{len(items)} "
        kind = _PLURAL.get(items[0]) or f"{items[0].__name__} objects"
        return f"a list of {count}{kind}, such as [...]"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return words[hint]


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
