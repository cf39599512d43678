"""Kimi Delta Attention: gate, chunked form for training and prefill, recurrent form, and the decode
step of a whole layer."""

from __future__ import annotations

import torch

from ..conv import short_conv
from ..device import takes_kernels
from ..norm import gated_norm
from ..precision import as_given, widest
from .blocked import chunk_kda_blocked
from .blocks import BlockOptions
from .chunk import chunk_kda_torch
from .naive import (
    check_inputs,
    check_state,
    check_step,
    kda_gate,
    naive_kda,
    prepare,
    query_scale,
    sequence_bounds,
)
from .replay import ReplayState, replay_kda

__all__ = [
    "ReplayState",
    "chunk_kda",
    "decode_kda",
    "decode_kda_",
    "kda_gate",
    "naive_kda",
    "recurrent_kda",
    "replay_kda",
]


def chunk_kda(
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
    """Delta-rule attention with channel-wise decay over packed or batched sequences.

    ``q, k [B, T, H, K]``, ``v [B, T, H, V]``, ``g [B, T, H, K]`` log decay (or its logit with
    ``use_gate_in_kernel``, then ``A_log [H]`` and ``dt_bias [H * K]``), ``beta [B, T, H]`` (or its
    logit with ``use_beta_sigmoid_in_kernel``). ``cu_seqlens [N + 1]`` packs N sequences in one row
    (B = 1). ``initial_state [N, H, K, V]``. Returns ``o [B, T, H, V]`` in v's dtype and the final
    state, fp32 or wider, or None. ``scale`` is ``K ** -0.5`` by default. Differentiable in every
    floating input. ``lower_bound`` is that of the gate in the kernel; a given log decay may be as
    low as it likes, except on a GPU in 16 bits (see below), where it becomes NaN below
    ``lower_bound`` and above 0. Autocast rounds nothing. ValueError names a shape, type or device
    or ``cu_seqlens`` (int32 or int64) that does not fit, or a ``lower_bound`` outside (-5.9, 0)
    (None is the unbounded gate); in torch's anomaly mode also a ``g`` that holds NaN or log decays
    above 0.

    On a GPU with v in bf16 or fp16, and q and k read in v's dtype, Triton kernels run (in Gluon on
    Hopper at head size 128), with head sizes 16, 32, 64 or 128, else ValueError, and fp32 sums,
    gates and states. There ``lower_bound=None`` runs in flash-linear-attention where that is
    installed, with head sizes up to 256 and with its accuracy and its tuning at the first call.
    Everything else runs in plain torch, in fp64 where an input has it. On a CPU a call with the
    gate in the kernel and a bound of at least -5 has a form of its own, made for the cache and only
    once differentiable.
    """
    check_inputs(q, k, v, g, beta, A_log, dt_bias, use_gate_in_kernel, lower_bound)
    batch, length, _, width = q.shape
    bounds = tuple(sequence_bounds(batch, length, cu_seqlens))
    check_state(initial_state, len(bounds) - 1, q, v)
    if takes_kernels(v) and lower_bound and bounds[-1]:
        from .fused import chunk_kda_fused
        from .tables import Options

        gate = use_gate_in_kernel
        options = Options(
            bounds,
            query_scale(scale, width),
            float(lower_bound),
            use_qk_l2norm_in_kernel,
            gate,
            use_beta_sigmoid_in_kernel,
        )
        out, final = chunk_kda_fused(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            g.flatten(0, 1),
            beta.flatten(0, 1),
            A_log if gate else None,
            dt_bias if gate else None,
            initial_state,
            output_final_state,
            options,
        )
        return out.view(v.shape), final
    if takes_kernels(v) and lower_bound is None and bounds[-1]:
        from .unbounded import chunk_kda_unbounded, installed

        if (module := installed()) is not None:
            return chunk_kda_unbounded(
                module,
                (q, k, v, g, beta),
                (A_log, dt_bias) if use_gate_in_kernel else (None, None),
                initial_state,
                None if cu_seqlens is None else bounds,
                final=output_final_state,
                scale=query_scale(scale, width),
                norm=use_qk_l2norm_in_kernel,
                sigmoid=use_beta_sigmoid_in_kernel,
            )
    bounded = use_gate_in_kernel and lower_bound is not None and lower_bound >= -5.0
    if bounded and v.device.type == "cpu":
        assert A_log is not None and dt_bias is not None and lower_bound is not None
        rows = (q, k, v, g, beta)
        if widest(*rows) == torch.float64:
            rows = tuple(x.double() for x in rows)
        out, final = chunk_kda_blocked(
            tuple(x.flatten(0, 1) for x in rows),
            A_log,
            dt_bias,
            initial_state,
            BlockOptions(
                bounds,
                query_scale(scale, width),
                float(lower_bound),
                use_qk_l2norm_in_kernel,
                use_beta_sigmoid_in_kernel,
            ),
        )
        return out.view(v.shape).to(v.dtype), final if output_final_state else None
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
    with as_given(v):
        out, final = chunk_kda_torch(
            qw.flatten(0, 1),
            kw.flatten(0, 1),
            vw.flatten(0, 1),
            gw.flatten(0, 1),
            bw.flatten(0, 1),
            initial_state,
            bounds,
            bounded,
        )
    return out.view(vw.shape).to(v.dtype), final if output_final_state else None


def recurrent_kda(
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
    """`chunk_kda` step by step, all sequences of a batch at once.

    The state that is given is never written, nor returned.

    On a GPU one token a sequence runs in one Triton kernel, in fp32 arithmetic, if the state is
    given in fp32, nothing is fp64, ``lower_bound`` is a number and head sizes are 16, 32, 64 or
    128. That kernel is for inference: a call that autograd follows, like everything else, runs in
    plain torch, with the same result but for rounding.
    """
    if cu_seqlens is not None or initial_state is None:
        return naive_kda(
            q,
            k,
            v,
            g,
            beta,
            A_log=A_log,
            dt_bias=dt_bias,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_gate_in_kernel=use_gate_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            lower_bound=lower_bound,
            cu_seqlens=cu_seqlens,
        )
    check_inputs(q, k, v, g, beta, A_log, dt_bias, use_gate_in_kernel, lower_bound)
    batch, length, heads, width = q.shape
    check_state(initial_state, batch, q, v)
    if v.is_cuda and lower_bound:
        from .step import recurrent_step, takes_step

        inputs = (q, k, v, g, beta)
        parameters = (A_log, dt_bias) if use_gate_in_kernel else (None, None)
        if takes_step(inputs, parameters, initial_state):
            return recurrent_step(
                inputs,
                parameters,
                initial_state,
                final=output_final_state,
                scale=query_scale(scale, width),
                bound=float(lower_bound),
                norm=use_qk_l2norm_in_kernel,
                sigmoid=use_beta_sigmoid_in_kernel,
            )
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
    state = initial_state.to(qw.dtype).flatten(0, 1)  # [B * H, K, V]
    outputs = []
    with as_given(v):
        for t in range(length):
            qt, kt, vt = (x[:, t].reshape(batch * heads, 1, -1) for x in (qw, kw, vw))
            state = state * gw[:, t].reshape(batch * heads, width, 1).exp()
            error = (vt - torch.bmm(kt, state)) * bw[:, t].reshape(-1, 1, 1)
            state = torch.baddbmm(state, kt.transpose(1, 2), error)
            outputs.append(torch.bmm(qt, state).view(batch, heads, -1))
    final = (state if length else state.clone()).view(initial_state.shape)
    out = torch.stack(outputs, 1).to(v.dtype) if outputs else v.clone()
    return out, final if output_final_state else None


def decode_kda(
    qkv: torch.Tensor,
    kernel: torch.Tensor,
    tail: torch.Tensor,
    z: torch.Tensor,
    beta: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    initial_state: torch.Tensor,
    lower_bound: float | None = -5.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token of N sequences through `short_conv`, `recurrent_kda` and `gated_norm`.

    ``qkv [N, C]`` with ``C = H (2 K + V)``, the heads of q, of k and of v side by side; ``kernel
    [C, W]`` and ``tail [N, W - 1, C]`` of the convolution; the logits ``z [N, H * K]`` of the
    decay, ``beta [N, H]`` and ``gate [N, H * V]``; ``weight [V]`` and ``eps`` of the norm;
    ``A_log [H]``, ``dt_bias [H * K]``; ``initial_state [N, H, K, V]``. Returns ``[N, H * V]`` in
    qkv's dtype, the new state, fp32 or wider, and the new tail in qkv's dtype. What is given is
    never written. Autocast rounds nothing. ValueError names an argument that does not fit.

    On a GPU this is one Triton kernel, in fp32 arithmetic, if the state is given in fp32, nothing
    is fp64, ``lower_bound`` is a number and head sizes are 16, 32, 64 or 128. It rounds where the
    three functions round, and nowhere else: q, k and v after SiLU, and the head's output before
    its norm, to qkv's dtype; so it differs from their kernels by the order of fp32 sums. That
    kernel is for inference: a call that autograd follows, like everything else, runs the three
    functions.
    """
    check_step(qkv, kernel, tail, z, beta, gate, weight, A_log, dt_bias, initial_state, lower_bound)
    count, heads, width, values = initial_state.shape
    if qkv.is_cuda and lower_bound:
        from .decode import decode_step, takes_decode

        rows, parameters = (qkv, z, beta, gate, tail), (kernel, weight, A_log, dt_bias)
        if takes_decode((*rows, *parameters), initial_state):
            bound = float(lower_bound)
            return decode_step(rows, parameters, initial_state, bound=bound, eps=eps)
    with as_given(qkv):
        mixed, new_tail = short_conv(qkv, kernel, tuple(range(count + 1)), tail)
        inner = heads * width
        q, k, v = mixed[:, None].split((inner, inner, heads * values), -1)
        out, final = recurrent_kda(
            q.unflatten(2, (heads, width)),
            k.unflatten(2, (heads, width)),
            v.unflatten(2, (heads, values)),
            z.view(count, 1, heads, width),
            beta[:, None],
            A_log=A_log,
            dt_bias=dt_bias,
            initial_state=initial_state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            lower_bound=lower_bound,
        )
        assert final is not None
        normed = gated_norm(out[:, 0], gate.view(count, heads, values), weight, eps)
    return normed.flatten(1), final, new_tail


def decode_kda_(
    qkv: torch.Tensor,
    kernel: torch.Tensor,
    tail: torch.Tensor,
    z: torch.Tensor,
    beta: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    places: torch.Tensor,
    lower_bound: float | None = -5.0,
) -> torch.Tensor:
    """`decode_kda` with ``state [S, H, K, V]`` and ``tail [S, W - 1, C]`` changed in place, without
    gradients: those of sequence n are row ``places[n]``, int [N]; its output ``[N, H * V]`` is 0
    where that is below 0.

    No row may be named twice. Where `decode_kda` is one kernel this is too, and does not wait for
    the GPU; ``state`` and ``tail`` must then be contiguous. ValueError names an argument that does
    not fit.
    """
    count = len(qkv)
    if places.shape != (count,) or len(tail) != len(state):
        raise ValueError(
            f"places must be [{count}] as qkv has rows, and tail and state have as many rows each, "
            f"got {list(places.shape)}, {len(tail)} and {len(state)}"
        )
    line = (qkv, kernel, tail[:1].expand(count, -1, -1), z, beta, gate, weight, A_log, dt_bias)
    check_step(*line, state[:1].expand(count, -1, -1, -1), lower_bound)
    rows, parameters = (qkv, z, beta, gate, tail), (kernel, weight, A_log, dt_bias)
    with torch.no_grad():
        if qkv.is_cuda and lower_bound:
            from .decode import decode_step, takes_decode

            if takes_decode((*rows, *parameters), state):
                if not (state.is_contiguous() and tail.is_contiguous()):
                    raise ValueError("state and tail must be contiguous")
                bound = float(lower_bound)
                return decode_step(rows, parameters, state, bound=bound, eps=eps, places=places)[0]
        used = (places >= 0).nonzero().flatten()
        if not len(used):
            return torch.zeros_like(gate)
        where = places[used].long()
        found, state[where], tail[where] = decode_kda(
            *(qkv[used], kernel, tail[where], z[used], beta[used], gate[used], weight, eps),
            A_log=A_log,
            dt_bias=dt_bias,
            initial_state=state[where],
            lower_bound=lower_bound,
        )
        return found.new_zeros(count, found.shape[1]).index_copy_(0, used, found)
