"""The unbounded gate on a GPU: the chunked form of flash-linear-attention, where that is installed.

Our kernels stand on the bound of the decay, theirs do not. What theirs are is theirs: they tune
themselves at the first call, which takes minutes, they round U and the states to 16 bits, and no
bits are promised for a sequence in another pack.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from functools import lru_cache
from typing import Any

import torch

from ..device import upload
from ..precision import as_given

MOST_WIDTH = 256  # of their kernels

Tensor = torch.Tensor


@lru_cache
def installed() -> Any:
    """Their module of KDA; None where the package is not there. ImportError if it is too old."""
    spec = importlib.util.find_spec("fla")
    if spec is None or spec.origin is None:  # not there, or a folder that happens to have the name
        return None
    return checked(importlib.import_module("fla.ops.kda"))


def checked(module: Any) -> Any:
    """``module`` itself; ImportError if its ``chunk_kda`` would pass over an argument of ours."""
    known = inspect.signature(module.chunk_kda).parameters
    if not {"use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "cu_seqlens_cpu"} <= set(known):
        raise ImportError(
            "flash-linear-attention is too old for lower_bound=None: install 0.6 or newer, or none"
        )
    return module


def chunk_kda_unbounded(
    module: Any,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    parameters: tuple[Tensor | None, Tensor | None],
    initial_state: Tensor | None,
    bounds: tuple[int, ...] | None,
    *,
    final: bool,
    scale: float,
    norm: bool,
    sigmoid: bool,
) -> tuple[Tensor, Tensor | None]:
    """`farhorizon.kernels.kda.chunk_kda` without a bound, by the ``chunk_kda`` of ``module``.

    ``inputs``: ``q, k, v, g, beta``, v in 16 bits, with one token or more; ``parameters`` A_log and
    dt_bias, both None where g is the log decay; ``bounds`` of packed sequences, None for a batch.
    Outputs in v's dtype, states in fp32. ValueError names a head size that theirs does not take.
    """
    q, k, v, g, beta = inputs
    for name, size in (("q", q.shape[-1]), ("v", v.shape[-1])):
        if size > MOST_WIDTH:
            raise ValueError(
                f"{name} has head size {size}; with lower_bound=None flash-linear-attention takes "
                f"up to {MOST_WIDTH} on GPU"
            )
    a_log, dt_bias = parameters
    packed: dict[str, Tensor] = {}
    if bounds is not None:  # made anew: theirs keeps what it derived from the very same tensor
        edges = torch.tensor(bounds, dtype=torch.int64)
        packed = {"cu_seqlens": upload(edges, v.device), "cu_seqlens_cpu": edges}
    with as_given(v):
        return module.chunk_kda(
            q=q.to(v.dtype),
            k=k.to(v.dtype),
            v=v,
            g=g,
            beta=beta,
            A_log=a_log,
            dt_bias=dt_bias,
            scale=scale,
            initial_state=None if initial_state is None else initial_state.float(),
            output_final_state=final,
            use_qk_l2norm_in_kernel=norm,
            use_gate_in_kernel=a_log is not None,
            use_beta_sigmoid_in_kernel=sigmoid,
            **packed,
        )
