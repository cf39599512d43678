"""Fields of ``config.json``: what a value of each kind must be."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from typing import Any

# Whole numbers that may be 0; all others count something that must be there.
_MAY_BE_ZERO = (
    "first_k_dense_replace",
    "num_shared_experts",
    "num_nextn_predict_layers",
    "max_position_embeddings",
)
_LARGEST = 2**31 - 1  # sizes of tensors must be whole numbers of torch


def check_names(names: Iterable[str], owner: type) -> None:
    """ValueError for a field whose name ``owner`` has for what it computes itself."""
    for name in names:
        found = inspect.getattr_static(owner, name, "")
        settable = isinstance(found, property) and found.fset is not None
        computed = isinstance(found, property | classmethod | staticmethod) or callable(found)
        if name == "gate_lower_bound":
            raise ValueError(f"config.json: {name} belongs into linear_attn_config")
        if name == "_published" or (computed and not settable):
            raise ValueError(f"config.json: {name} is no field, but a name that is used here")


def check_field(name: str, value: Any, kind: str) -> None:
    """ValueError naming the field unless ``value`` is of ``kind``, an annotation as text."""
    least = 0 if name in _MAY_BE_ZERO else 1
    fits, wanted = {
        "bool": (type(value) is bool, "true or false"),
        "int": (
            type(value) is int and least <= value <= _LARGEST,
            f"a whole number of at least {least} and below 2^31",
        ),
        "float": (_is_number(value) and 0 < value < math.inf, "a positive number"),
        "bound": (_is_number(value) and -5 <= value < 0, "null or a number in [-5, 0)"),
        "str": (isinstance(value, str), "a text"),
        "dict[str, Any]": (isinstance(value, dict), "an object"),
        "list[int]": (
            isinstance(value, list | tuple) and all(type(x) is int for x in value),
            "a list of whole numbers",
        ),
    }[kind.removesuffix(" | None")]
    if not fits and not (value is None and kind.endswith(" | None")):
        raise ValueError(f"config.json: {name}={value!r} must be {wanted}")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
