"""Kimi Delta Attention, token by token: the specification every other form is tested against.

State S [K, V] per head, log decay g_t [K] in [lower_bound, 0], write strength beta_t:
    S <- Diag(exp(g_t)) S;  S <- S + beta_t k_t (v_t - S^T k_t)^T;  o_t = S^T (scale q_t)
(Kimi K3 report 2.1.1; Kimi Linear, arXiv:2510.26692, eq. 1.)
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from ..precision import as_given, widen, widest

LOWEST_BOUND = -5.9  # 15 steps of it span e^88.5, the range of fp32 and bf16


def kda_gate(
    z: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None = -5.0,
) -> torch.Tensor:
    """Log decay of every channel from its logit, in fp32 or wider.

    ``z [B, T, H, K]``, ``A_log [H]``, ``dt_bias [H * K]`` -> ``[B, T, H, K]``. The bounded gate is
    ``lower_bound * sigmoid(exp(A) (z + dt_bias))`` (Kimi K3 report 2.1.1); ``None`` selects the
    unbounded ``-exp(A) softplus(z + dt_bias)`` of Kimi Linear. ValueError names a shape that does
    not fit, or a ``lower_bound`` outside (-5.9, 0).
    """
    check_bound(lower_bound)
    check_gate(z, A_log, dt_bias)
    heads, width = z.shape[-2:]
    z = widen(z) + dt_bias.view(heads, width)
    rate = A_log.to(z.dtype).exp()[:, None]
    if lower_bound is None:
        return -rate * F.softplus(z)
    return lower_bound * torch.sigmoid(rate * z)


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    scale: float | None,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    lower_bound: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Wide inputs of the bare recurrence, from such as `check_inputs` lets pass: normalised and
    scaled q, k, v, log decay, beta."""
    wide, factor = widest(q, k, v, g, beta), query_scale(scale, q.shape[-1])
    q, k, v, g, beta = (x.to(wide) for x in (q, k, v, g, beta))
    if use_gate_in_kernel:
        assert A_log is not None and dt_bias is not None
        g = kda_gate(g, A_log, dt_bias, lower_bound).to(wide)
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid()
    if use_qk_l2norm_in_kernel:
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6)
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    return q * factor, k, v, g, beta


def query_scale(scale: float | None, width: int) -> float:
    """``scale`` as Python's own float, which kernels are compiled for; ``K ** -0.5`` for None."""
    return width**-0.5 if scale is None else float(scale)


def check_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    gate: bool,
    lower_bound: float | None,
) -> None:
    """ValueError names the argument that does not fit: ``q, k, g [B, T, H, K]``,
    ``v [B, T, H, V]``, ``beta [B, T, H]``, ``A_log [H]`` and ``dt_bias [H * K]`` with the gate,
    all of a real float type and on v's device, ``lower_bound`` in (-5.9, 0) or None; in torch's
    anomaly mode also a ``g`` that holds NaN or, as a log decay, something above 0."""
    check_bound(lower_bound)
    for name, x in (("q", q), ("v", v)):
        if x.dim() != 4 or not all(x.shape[2:]):
            raise ValueError(f"{name} must be [B, T, H, size], got shape {tuple(x.shape)}")
    for name, x, shape in (
        ("k", k, q.shape),
        ("g", g, q.shape),
        ("v", v, (*q.shape[:3], v.shape[3])),
        ("beta", beta, q.shape[:3]),
    ):
        if x.shape != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, expected {tuple(shape)}")
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    if gate:
        if a_log is None or dt_bias is None:
            raise ValueError("use_gate_in_kernel=True needs A_log and dt_bias")
        check_gate(g, a_log, dt_bias)
        given |= {"A_log": a_log, "dt_bias": dt_bias}
    for name, x in given.items():
        check_kind(name, x, v.device)
    if torch.is_anomaly_enabled():
        if g.isnan().any():
            raise ValueError("g holds NaN")
        if not gate and (g > 0).any():
            raise ValueError(f"g must be a log decay, at most 0; it goes up to {float(g.max())}")


def check_kind(name: str, x: torch.Tensor, device: torch.device) -> None:
    """ValueError unless ``x`` is of a real float type and on ``device``."""
    if not x.is_floating_point():
        raise ValueError(f"{name} must be of a real float type, got {x.dtype}")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, expected {device}")


def check_gate(z: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor) -> None:
    """ValueError unless ``a_log [H]`` and ``dt_bias [H * K]`` fit ``z [..., H, K]``."""
    if z.dim() < 2:
        raise ValueError(f"z must be [..., H, K], got shape {tuple(z.shape)}")
    heads, width = z.shape[-2:]
    for name, x, count in (("A_log", a_log, heads), ("dt_bias", dt_bias, heads * width)):
        if tuple(x.shape) != (count,):
            raise ValueError(f"{name} has shape {tuple(x.shape)}, expected {(count,)}")


def check_bound(lower_bound: float | None) -> None:
    if lower_bound is not None and not LOWEST_BOUND < lower_bound < 0:
        raise ValueError(f"lower_bound must lie in ({LOWEST_BOUND}, 0), got {lower_bound}")


def check_state(
    state: torch.Tensor | None, sequences: int, q: torch.Tensor, v: torch.Tensor
) -> None:
    """ValueError unless ``state`` is ``[N, H, K, V]``, of a real float type and where ``v`` is, or
    None."""
    if state is None:
        return
    shape = (sequences, q.shape[2], q.shape[3], v.shape[3])
    if tuple(state.shape) != shape:
        raise ValueError(f"initial_state has shape {tuple(state.shape)}, expected {shape}")
    check_kind("initial_state", state, v.device)


def check_step(
    qkv: torch.Tensor,
    kernel: torch.Tensor,
    tail: torch.Tensor,
    z: torch.Tensor,
    beta: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    lower_bound: float | None,
) -> None:
    """ValueError names the argument of `farhorizon.kernels.kda.decode_kda` that does not fit
    ``state [N, H, K, V]`` and the width of ``kernel``, or a ``lower_bound`` out of range."""
    check_bound(lower_bound)
    if state.dim() != 4 or not len(state) or kernel.dim() != 2:
        raise ValueError(
            "initial_state must be [N, H, K, V] with N above 0 and kernel [C, W], got "
            f"{list(state.shape)} and {list(kernel.shape)}"
        )
    count, heads, width, values = state.shape
    channels, taps = heads * (2 * width + values), kernel.shape[1]
    for name, x, shape in (
        ("qkv", qkv, (count, channels)),
        ("kernel", kernel, (channels, taps)),
        ("tail", tail, (count, taps - 1, channels)),
        ("z", z, (count, heads * width)),
        ("beta", beta, (count, heads)),
        ("gate", gate, (count, heads * values)),
        ("weight", weight, (values,)),
        ("A_log", a_log, (heads,)),
        ("dt_bias", dt_bias, (heads * width,)),
    ):
        if tuple(x.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, expected {shape}")
        check_kind(name, x, state.device)


def sequence_bounds(batch: int, length: int, cu_seqlens: torch.Tensor | None) -> list[int]:
    """Start offsets of the sequences in the flattened ``[B * T]`` token order, with the end."""
    if cu_seqlens is None:
        return list(range(0, batch * length + 1, length)) if length else [0] * (batch + 1)
    if batch != 1:
        raise ValueError(f"cu_seqlens needs batch size 1, got {batch}")
    if not isinstance(cu_seqlens, torch.Tensor):  # the mistake of those who hold plain numbers
        kind = type(cu_seqlens).__name__
        raise ValueError(f"cu_seqlens must be an int32 or int64 tensor [N + 1], got a {kind}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1:
        shape = list(cu_seqlens.shape)
        raise ValueError(
            f"cu_seqlens must be int32 or int64 [N + 1], got {cu_seqlens.dtype} {shape}"
        )
    bounds = cu_seqlens.tolist()
    falls = any(a > b for a, b in itertools.pairwise(bounds))
    if falls or not bounds or bounds[0] != 0 or bounds[-1] != length:
        raise ValueError(f"cu_seqlens must rise from 0 to {length}, got {bounds[:8]}")
    return bounds


def naive_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    lower_bound: float | None = -5.0,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The recurrence, one token after another, in fp32 or, where an input has it, fp64.

    Arguments and result as `farhorizon.kernels.kda.chunk_kda`. Autocast rounds nothing.
    """
    check_inputs(q, k, v, g, beta, A_log, dt_bias, use_gate_in_kernel, lower_bound)
    qw, kw, vw, gw, bw = prepare(
        q,
        k,
        v,
        g,
        beta,
        A_log=A_log,
        dt_bias=dt_bias,
        scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        lower_bound=lower_bound,
    )
    batch, length, heads, width = qw.shape
    bounds = sequence_bounds(batch, length, cu_seqlens)
    check_state(initial_state, len(bounds) - 1, qw, vw)
    initial = vw.new_zeros(len(bounds) - 1, heads, width, vw.shape[-1])
    if initial_state is not None:
        initial = initial_state.to(qw.dtype)
    rows = [x.flatten(0, 1) for x in (qw, kw, vw, gw, bw[..., None])]
    outputs, finals = [rows[2][:0]], [initial[:0]]
    with as_given(v):
        for n, (start, end) in enumerate(itertools.pairwise(bounds)):
            state = initial[n]
            for t in range(start, end):
                qt, kt, vt, gt, bt = (x[t] for x in rows)
                state = state * gt.exp()[..., None]
                error = vt - torch.einsum("hk,hkv->hv", kt, state)
                state = state + torch.einsum("hk,hv->hkv", bt * kt, error)
                outputs.append(torch.einsum("hk,hkv->hv", qt, state)[None])
            finals.append(state[None])
    out = torch.cat(outputs).view(vw.shape).to(v.dtype)
    return out, torch.cat(finals) if output_final_state else None
