"""KDA and the mixture over depth against the reference functions of fla-core.

They are plain torch, and compute in fp32 whatever they are given. Their files are read by
themselves: importing the package takes many seconds, and warns that there is no GPU. The two gates
are taken out of a file of kernels.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from farhorizon.kernels.attnres import mix, mix_norm, naive_mix
from farhorizon.kernels.kda import chunk_kda, kda_gate, naive_kda, recurrent_kda

B, H, K, V = 2, 3, 16, 24


def file_of(name: str) -> Path:
    """A file of fla-core, which `launch/setup.sh` puts beside the environment's packages."""
    return Path(sys.prefix, "references", "fla", "ops", f"{name}.py")


@cache
def reference(name: str) -> Any:
    """The module in one of its files."""
    spec = importlib.util.spec_from_file_location(
        f"reference_{name.replace('/', '_')}", file_of(name)
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reference_gate(bounded: bool) -> Any:
    """One of the two functions of plain torch in its file of gates."""
    name = "naive_kda_lowerbound_gate" if bounded else "naive_kda_gate"
    tree = ast.parse(file_of("kda/gate").read_text(encoding="utf-8"))
    tree.body = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    known: dict[str, Any] = {"torch": torch, "F": F}
    exec(compile(tree, "kda/gate", "exec"), known)
    return known[name]


def kda_inputs(tokens: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Everything that KDA is given, the logits of decay and beta among it."""
    torch.manual_seed(tokens)
    shapes: dict[str, tuple[int, ...]] = {
        "q": (B, tokens, H, K),
        "k": (B, tokens, H, K),
        "v": (B, tokens, H, V),
        "g": (B, tokens, H, K),
        "beta": (B, tokens, H),
        "A_log": (H,),
        "dt_bias": (H * K,),
        "initial_state": (B, H, K, V),
    }
    made = {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
    made["dt_bias"] -= 2
    return made


def theirs(given: dict[str, Tensor], lower_bound: float | None, chunked: bool) -> Any:
    """Outputs and last state of theirs; unit lengths and sigmoid are done before, as their layers'
    kernels do them."""
    given = {name: x.float() for name, x in given.items()}
    gate = reference_gate(lower_bound is not None)
    bound = {} if lower_bound is None else {"lower_bound": lower_bound}
    decay = gate(given["g"], given["A_log"], given["dt_bias"], **bound)
    q, k = (
        x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (given["q"], given["k"])
    )
    module = reference("kda/naive")
    call = module.naive_chunk_kda if chunked else module.naive_recurrent_kda
    return call(
        *(q, k, given["v"], decay, given["beta"].sigmoid()),
        initial_state=given["initial_state"],
        output_final_state=True,
    )


def ours(call: Any, given: dict[str, Tensor], lower_bound: float | None) -> Any:
    return call(
        **given,
        lower_bound=lower_bound,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    )


def error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over the root mean square of what is wanted."""
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).abs().max() / wanted.square().mean().sqrt())


@pytest.mark.parametrize("lower_bound", [-5.0, -1.5, None])
def test_gates_are_theirs(lower_bound: float | None) -> None:
    given = kda_inputs(64, torch.float32)
    rows = (given["g"], given["A_log"], given["dt_bias"])
    bound = {} if lower_bound is None else {"lower_bound": lower_bound}
    wanted = reference_gate(lower_bound is not None)(*rows, **bound)
    assert error(kda_gate(*rows, lower_bound), wanted) < 1e-6
    assert float(wanted.max() - wanted.min()) > 1


@pytest.mark.parametrize("chunked", [False, True], ids=["recurrent", "chunked"])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("call", [naive_kda, chunk_kda, recurrent_kda])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kda_is_theirs(
    call: Any, lower_bound: float | None, chunked: bool, dtype: torch.dtype
) -> None:
    """Also what theirs rounds: its chunks take differences of sums of decays over 64 tokens, which
    leaves it 1e-5 from fp64, its recurrence 2e-6; in fp32 all three of ours are within 2e-6."""
    given = kda_inputs(128, dtype)
    wanted, last = theirs(given, lower_bound, chunked)
    found, state = ours(call, given, lower_bound)
    allowed = 3e-5 if chunked else 1e-5
    assert error(found, wanted) < allowed and error(state, last) < allowed


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_gradients_of_kda_are_theirs(lower_bound: float | None) -> None:
    given = {n: x.requires_grad_() for n, x in kda_inputs(70, torch.float32).items()}
    draw = torch.Generator().manual_seed(5)
    upstream = torch.randn(B, 70, H, V, generator=draw), torch.randn(B, H, K, V, generator=draw)
    wanted = torch.autograd.grad(theirs(given, lower_bound, False), [*given.values()], upstream)
    found = torch.autograd.grad(ours(chunk_kda, given, lower_bound), [*given.values()], upstream)
    for name, one, other in zip(given, found, wanted, strict=True):
        assert error(one, other) < 5e-5, name


def test_log_decays_and_scale_are_theirs() -> None:
    given = kda_inputs(64, torch.float32)
    q, k, v, g, beta, *_ = given.values()
    k, g, beta = F.normalize(k, dim=-1), -g.square(), beta.sigmoid()
    for scale in (None, 0.7):
        recurrent = reference("kda/naive").naive_recurrent_kda
        wanted, last = recurrent(q, k, v, g, beta, scale, output_final_state=True)
        found, state = chunk_kda(q, k, v, g, beta, scale=scale, output_final_state=True)
        assert state is not None
        assert error(found, wanted) < 1e-5 and error(state, last) < 1e-5


def site(sources: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Sources ``[2, 7, 40]``, query, weight of their norm, and of the norm behind the mixture."""
    torch.manual_seed(sources)
    values = [(3 * torch.randn(2, 7, 40, dtype=dtype)).requires_grad_() for _ in range(sources)]
    query = torch.randn(40, dtype=dtype, requires_grad=True)
    weights = [(1 + 0.3 * torch.randn(40, dtype=dtype)).requires_grad_() for _ in range(2)]
    return values, query, weights[0], weights[1]


@pytest.mark.parametrize("eps", [1e-5, 1e-1])
@pytest.mark.parametrize("sources", [1, 2, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mixtures_over_depth_are_theirs(sources: int, eps: float, dtype: torch.dtype) -> None:
    naive_attnres = reference("attnres/naive").naive_attnres
    values, query, norm, following = site(sources, dtype)
    wanted, share = naive_attnres(query, values, norm, rms_eps=eps, return_weights=True)
    assert sources == 1 or (float(share.detach().max()) > 0.9 and float(share.detach().min()) < 0.1)
    for call in (mix, naive_mix):
        assert error(call(values, query, norm, eps), wanted) < 1e-5
    normed = naive_attnres(query, values, norm, following, rms_eps=eps)
    found = mix_norm(values[:-1], values[-1], None, query, norm, following, eps)[2]
    assert error(found, normed) < 1e-5
    given = [query, norm, *values] if sources > 1 else values  # alone, a source is the mixture
    upstream = torch.randn(wanted.shape, dtype=dtype)
    gradients = torch.autograd.grad(wanted, given, upstream)
    ours_ = torch.autograd.grad(mix(values, query, norm, eps), given, upstream)
    for one, other in zip(ours_, gradients, strict=True):
        # Of a source with a share of 1e-9 little is left of terms that cancel in fp32.
        assert error(one, other) < 5e-5
