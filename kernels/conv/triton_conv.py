"""Short convolution and SiLU in Triton, forward and backward.

With the taps w_0 .. w_{W-1}, the last for the token itself:
    p_t = sum_i w_i x_{t-(W-1)+i}    y_t = p_t s(p_t)    s the sigmoid
and backward, with g_t = dy_t s (1 + p_t (1 - s)), zero outside the sequence:
    dx_t = sum_i w_i g_{t+(W-1)-i}    dw_i = sum_t g_t x_{t-(W-1)+i}
Tiles never cross the edge of a sequence and every sum is a chain of fused multiply-adds in one
fixed order, so that no bit of y or dx depends on how sequences are packed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_sigmoid import sigmoid


@triton.jit
def silu_slope(p, FAST: tl.constexpr):
    """Derivative of p sigmoid(p)."""
    share = sigmoid(p, FAST)
    return share * tl.fma(p, 1.0 - share, 1.0)


@triton.jit
def taps_of(kernel, channel, present, W: tl.constexpr):
    """The taps of a block of channels, one vector each."""
    weights = ()
    for i in tl.static_range(W):
        weight = tl.load(kernel + channel * W + i, mask=present, other=0.0).to(tl.float32)
        weights = weights + (weight,)
    return weights


@triton.jit
def inputs_before(x_row, x_t, tail, channels, age, present, W: tl.constexpr, TAIL: tl.constexpr):
    """The W - 1 inputs before the token at ``x_row``, the ``age``-th of its sequence, latest last;
    those before the sequence from its ``tail``."""
    history = ()
    for i in tl.static_range(W - 1):
        back = W - 1 - i
        value = tl.load(x_row - back * x_t, mask=present & (age >= back), other=0.0).to(tl.float32)
        if TAIL:
            early = present & (age < back)
            before = tl.load(tail + (age + i) * channels, mask=early, other=0.0).to(tl.float32)
            value = tl.where(age < back, before, value)
        history = history + (value,)
    return history


@triton.jit
def convolve(weights, window, W: tl.constexpr):
    total = weights[0] * window[0]
    for i in tl.static_range(1, W):
        total = tl.fma(weights[i], window[i], total)
    return total


@triton.jit
def conv_kernel(
    x,
    kernel,
    tail,
    out,
    tiles,
    channels,
    x_t,
    W: tl.constexpr,
    BC: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
    TAIL: tl.constexpr,
    FAST: tl.constexpr,
):
    """Walks over the tokens of a tile; grid (channel blocks times tiles), channels first."""
    blocks = tl.cdiv(channels, BC)
    tile = tl.program_id(0) // blocks
    channel = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    present = channel < channels
    start = tl.load(tiles + 5 * tile).to(tl.int64)
    count = tl.load(tiles + 5 * tile + 1)
    age = tl.load(tiles + 5 * tile + 2)
    sequence = tl.load(tiles + 5 * tile + 4).to(tl.int64)
    x_row = x + start * x_t + channel
    out_row = out + start * channels + channel
    edge = tail + sequence * (W - 1) * channels + channel
    weights = taps_of(kernel, channel, present, W)
    history = inputs_before(x_row, x_t, edge, channels, age, present, W, TAIL)
    for t in tl.range(0, count, UNROLL, num_stages=STAGES):
        inputs = ()
        for j in tl.static_range(UNROLL):
            here = present & (t + j < count)
            inputs = inputs + (tl.load(x_row + (t + j) * x_t, mask=here, other=0.0),)
        for j in tl.static_range(UNROLL):
            window = history + (inputs[j].to(tl.float32),)
            p = convolve(weights, window, W)
            y = p * sigmoid(p, FAST)
            here = present & (t + j < count)
            tl.store(out_row + (t + j) * channels, y.to(out.dtype.element_ty), mask=here)
            history = window[1:]


@triton.jit
def new_tail_kernel(
    x,
    tail,
    new_tail,
    bounds,
    channels,
    x_t,
    W: tl.constexpr,
    BC: tl.constexpr,
    TAIL: tl.constexpr,
):
    """The last W - 1 inputs of a sequence; grid (channel blocks times sequences)."""
    blocks = tl.cdiv(channels, BC)
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    channel = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    present = channel < channels
    begin = tl.load(bounds + sequence).to(tl.int64)
    end = tl.load(bounds + sequence + 1).to(tl.int64)
    for j in tl.static_range(W - 1):
        token = end - (W - 1) + j
        value = tl.load(x + token * x_t + channel, mask=present & (token >= begin), other=0.0)
        value = value.to(new_tail.dtype.element_ty)
        if TAIL:
            place = (sequence * (W - 1) + end - begin + j) * channels + channel
            before = tl.load(tail + place, mask=present & (token < begin), other=0.0)
            value = tl.where(token < begin, before.to(value.dtype), value)
        tl.store(new_tail + (sequence * (W - 1) + j) * channels + channel, value, mask=present)


@triton.jit
def advance(weights, history, pending, sums, x, d_out, W: tl.constexpr, FAST: tl.constexpr):
    """One token of the walk over a tile: the finished dx of the token W - 1 before, then history,
    pending and sums as they are after the token.

    ``history`` holds the W - 1 inputs before the token, latest last; ``pending`` dx of these
    tokens without what this one and later ones add, latest last; ``sums`` the shares of dw.
    """
    window = history + (x,)
    g = d_out * silu_slope(convolve(weights, window, W), FAST)
    added = ()
    for i in tl.static_range(W):
        added = added + (tl.fma(g, window[i], sums[i]),)
    spread = ()
    for i in tl.static_range(W - 1):
        spread = spread + (tl.fma(weights[i], g, pending[i]),)
    spread = spread + (weights[W - 1] * g,)
    return spread[0], window[1:], spread[1:], added


@triton.jit
def conv_backward_kernel(
    x,
    kernel,
    tail,
    d_out,
    d_new_tail,
    dx,
    d_kernel,
    tiles,
    programs,
    channels,
    x_t,
    do_t,
    W: tl.constexpr,
    BC: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
    TAIL: tl.constexpr,
    NEW_TAIL: tl.constexpr,
    FAST: tl.constexpr,
):
    """Walks over the tokens of some tiles; grid (channel blocks times programs), channels first.

    Full tiles have a multiple of ``UNROLL`` tokens. ``d_kernel [programs, W, C]`` takes the sums
    over these tokens.
    """
    blocks = tl.cdiv(channels, BC)
    program = tl.program_id(0) // blocks
    channel = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    present = channel < channels
    zero = tl.zeros([BC], tl.float32)
    weights, sums = taps_of(kernel, channel, present, W), ()
    for _ in tl.static_range(W):
        sums = sums + (zero,)
    for tile in range(tl.load(programs + program), tl.load(programs + program + 1)):
        start = tl.load(tiles + 5 * tile).to(tl.int64)
        count = tl.load(tiles + 5 * tile + 1)
        age = tl.load(tiles + 5 * tile + 2)
        left = tl.load(tiles + 5 * tile + 3)
        sequence = tl.load(tiles + 5 * tile + 4).to(tl.int64)
        x_row = x + start * x_t + channel
        do_row = d_out + start * do_t + channel
        dx_row = dx + start * channels + channel
        edge = sequence * (W - 1) * channels + channel
        history = inputs_before(x_row, x_t, tail + edge, channels, age, present, W, TAIL)
        pending = ()
        for _ in tl.static_range(W - 1):
            pending = pending + (zero,)
        for t in tl.range(0, count, UNROLL, num_stages=STAGES):
            # tokens past the sequence's end have no gradient and add nothing
            inputs, grads = (), ()
            for j in tl.static_range(UNROLL):
                here = present & (t + j < count)
                inputs = inputs + (tl.load(x_row + (t + j) * x_t, mask=here, other=0.0),)
                grads = grads + (tl.load(do_row + (t + j) * do_t, mask=here, other=0.0),)
            for j in tl.static_range(UNROLL):
                value, grad = inputs[j].to(tl.float32), grads[j].to(tl.float32)
                d_x, history, pending, sums = advance(
                    weights, history, pending, sums, value, grad, W, FAST
                )
                token = t + j - (W - 1)
                if NEW_TAIL:
                    slot = token - left + (W - 1)
                    late = present & (slot >= 0) & (token < count)
                    d_x += tl.load(d_new_tail + edge + slot * channels, mask=late, other=0.0).to(
                        tl.float32
                    )
                tl.store(
                    dx_row + token * channels,
                    d_x.to(dx.dtype.element_ty),
                    mask=present & (token >= 0) & (token < count),
                )
        # the tokens behind the tile add to dx of its last ones
        reached = tl.cdiv(count, UNROLL) * UNROLL
        unused = sums
        for j in tl.static_range(W - 1):
            token = reached + j
            here = present & (token < left)
            value = tl.load(x_row + token * x_t, mask=here, other=0.0).to(tl.float32)
            grad = tl.load(do_row + token * do_t, mask=here, other=0.0).to(tl.float32)
            d_x, history, pending, unused = advance(
                weights, history, pending, unused, value, grad, W, FAST
            )
            token = reached + j - (W - 1)
            if NEW_TAIL:
                slot = token - left + (W - 1)
                late = present & (slot >= 0) & (token < count)
                d_x += tl.load(d_new_tail + edge + slot * channels, mask=late, other=0.0).to(
                    tl.float32
                )
            tl.store(
                dx_row + token * channels,
                d_x.to(dx.dtype.element_ty),
                mask=present & (token >= 0) & (token < count),
            )
    place = program.to(tl.int64) * W * channels + channel
    for i in tl.static_range(W):
        tl.store(d_kernel + place + i * channels, sums[i], mask=present)


@triton.jit
def tail_backward_kernel(
    x,
    kernel,
    tail,
    d_out,
    d_new_tail,
    d_tail,
    bounds,
    channels,
    x_t,
    do_t,
    W: tl.constexpr,
    BC: tl.constexpr,
    NEW_TAIL: tl.constexpr,
    FAST: tl.constexpr,
):
    """What the first W - 1 tokens of a sequence and its new tail give to its tail; grid (channel
    blocks times sequences)."""
    blocks = tl.cdiv(channels, BC)
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    channel = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    present = channel < channels
    begin = tl.load(bounds + sequence).to(tl.int64)
    length = tl.load(bounds + sequence + 1).to(tl.int64) - begin
    edge = sequence * (W - 1) * channels + channel
    zero = tl.zeros([BC], tl.float32)
    weights = taps_of(kernel, channel, present, W)
    history, pending, unused = (), (), (zero,)
    for i in tl.static_range(W - 1):
        used = present & (length > 0)  # no token sees it, whatever it holds
        before = tl.load(tail + edge + i * channels, mask=used, other=0.0).to(tl.float32)
        history, pending, unused = history + (before,), pending + (zero,), unused + (zero,)
    for j in tl.static_range(W - 1):
        here = present & (j < length)
        value = tl.load(x + (begin + j) * x_t + channel, mask=here, other=0.0).to(tl.float32)
        grad = tl.load(d_out + (begin + j) * do_t + channel, mask=here, other=0.0).to(tl.float32)
        found, history, pending, unused = advance(
            weights, history, pending, unused, value, grad, W, FAST
        )
        if NEW_TAIL:
            passed = present & (j >= length)
            found += tl.load(
                d_new_tail + edge + (j - length) * channels, mask=passed, other=0.0
            ).to(tl.float32)
        tl.store(d_tail + edge + j * channels, found.to(d_tail.dtype.element_ty), mask=present)
