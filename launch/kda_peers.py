"""Implementations of KDA that ``farhorizon bench kda`` sets side by side: ours and its peers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..configs.errors import UserError
from ..kernels.kda import chunk_kda, recurrent_kda
from .kda_rows import OURS

WIDTH = 128
FLAGS: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}
FLA = "flash-linear-attention"
LIBRARY = "_flashkda_C.abi3.so"  # of vLLM

Tensor = torch.Tensor
Inputs = dict[str, torch.Tensor]  # the arguments of `chunk_kda` by their names
Call = Callable[[Inputs, bool], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True, slots=True)
class Side:
    """One implementation: ``call(inputs, final)`` gives ``o [1, T, H, V]`` and, where ``final``
    asks for it, the state ``[1, H, K, V]``; ``trains`` says whether it has a backward pass."""

    name: str
    call: Call
    trains: bool


@dataclass(frozen=True, slots=True)
class Decoder:
    """One token of every sequence: ``step(inputs, state)`` gives ``o [N, 1, H, V]`` and the state
    ``[N, H, K, V]`` after it, which may be the given one written over."""

    name: str
    step: Callable[[Inputs, Tensor], tuple[Tensor, Tensor]]


def ours(inputs: Inputs, final: bool) -> tuple[Tensor, Tensor | None]:
    return chunk_kda(**inputs, **FLAGS, output_final_state=final)


def recurrent(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    out, after = recurrent_kda(**inputs, **FLAGS, initial_state=state, output_final_state=True)
    assert after is not None
    return out, after


DECODERS = (Decoder("recurrent_kda", recurrent),)


def check_peers(names: Sequence[str]) -> None:
    """UserError for a name that no peer has."""
    for name in names:
        if name not in _PEERS:
            raise UserError(f"peers: {name!r} is none; known: {', '.join(_PEERS)}, or [] for none")


def find_sides(names: Sequence[str]) -> list[Side]:
    """Ours, and those of the named peers that are installed; a line says which are not."""
    sides = [Side(OURS, ours, trains=True)]
    for name in dict.fromkeys(names):
        side = _PEERS[name]()
        if isinstance(side, Side):
            sides.append(side)
        else:
            print(f"{side} is not installed: left out")
    return sides


def _fla() -> Side | str:
    spec = importlib.util.find_spec("fla")
    if spec is None or spec.origin is None:  # not there, or a folder that happens to have the name
        return FLA
    from fla.ops.kda import chunk_kda as theirs  # pyright: ignore[reportMissingImports]

    def call(inputs: Inputs, final: bool) -> tuple[Tensor, Tensor | None]:
        rest = {"safe_gate": True, "lower_bound": -5.0, "output_final_state": final}
        return theirs(**inputs, **FLAGS, **rest)

    return Side(FLA, call, trains=True)


def _flashkda() -> Side | str:
    spec = importlib.util.find_spec("vllm")
    folders = (spec.submodule_search_locations if spec else None) or ()
    for library in (Path(folder) / LIBRARY for folder in folders):
        if library.exists():
            torch.ops.load_library(str(library))
            return Side("FlashKDA", flash_kda, trains=False)
    return f"FlashKDA (vllm's {LIBRARY})"


_PEERS: dict[str, Callable[[], Side | str]] = {"fla": _fla, "flashkda": _flashkda}


def flash_kda(inputs: Inputs, final: bool) -> tuple[Tensor, Tensor | None]:
    """FlashKDA on buffers that belong to the call; its states are ``[1, H, V, K]``."""
    q, k, v, g, beta = (inputs[name] for name in ("q", "k", "v", "g", "beta"))
    _, tokens, heads, _ = q.shape
    op = torch.ops._flashkda_C
    out = torch.empty_like(q)
    start = torch.zeros(1, heads, WIDTH, WIDTH, device=q.device)
    last = torch.empty_like(start)
    bounds = torch.zeros(2, dtype=torch.int64, device=q.device)
    bounds[1:].fill_(tokens)  # no copy from the host: a graph is being captured
    space = torch.empty(op.get_workspace_size(tokens, heads, 1), dtype=torch.uint8, device=q.device)
    op.fwd(
        *(q, k, v, g, beta, WIDTH**-0.5, out, space, inputs["A_log"]),
        *(inputs["dt_bias"].view(heads, WIDTH), -5.0, start, last),
        *(bounds, None, None),
    )
    return out, last.transpose(2, 3) if final else None
