"""What the kernels of the mixture over depth share: sums, loads, and registers that are kept."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_two(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def add_four(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def add_eight(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


@triton.jit
def totals(parts):
    """Sums of the vectors, up to eight in one reduction, for in each the warps wait for another."""
    N: tl.constexpr = len(parts)
    sums = ()
    for i in tl.static_range(0, N - N % 8, 8):
        sums = sums + tl.reduce(parts[i : i + 8], 0, add_eight)
    if N % 8 >= 4:
        sums = sums + tl.reduce(parts[N - N % 8 : N - N % 4], 0, add_four)
    if N % 4 >= 2:
        sums = sums + tl.reduce(parts[N - N % 4 : N - N % 2], 0, add_two)
    if N % 2 == 1:
        sums = sums + (tl.sum(parts[N - 1], 0),)
    return sums


@triton.jit
def load_group(
    sources, update, summed, place, inside, FIRST: tl.constexpr, END: tl.constexpr, M, UPDATE
):
    """The same elements of sources FIRST to END, in the types that these are stored in."""
    group = ()
    for i in tl.static_range(FIRST, END):
        if i < M:
            one = tl.load(sources[i] + place, mask=inside, other=0.0)
            if UPDATE and i == M - 1:
                more = tl.load(update + place, mask=inside, other=0.0)
                one = (one.to(tl.float32) + more.to(tl.float32)).to(summed.dtype.element_ty)
            group = group + (one,)
    return group


BF16_PAIR = tl.constexpr(
    "{.reg .b32 a; xor.b32 a, $2, $3; shl.b32 $0, a, 16; and.b32 $1, a, 0xffff0000;}"
)
FP16_PAIR = tl.constexpr(
    "{.reg .b32 a; .reg .b16 b, c; xor.b32 a, $2, $3; mov.b32 {b, c}, a;"
    " cvt.f32.f16 $0, b; cvt.f32.f16 $1, c;}"
)


@triton.jit
def widen(x, zero, FAST: tl.constexpr):
    """``x`` in fp32, in pairs, by a ``zero`` that the compiler does not know to be one: it would
    keep what a first use made of ``x`` for the second, in twice the registers."""
    wide = x
    if FAST and x.dtype.primitive_bitwidth == 16:
        pair: tl.constexpr = BF16_PAIR if x.dtype == tl.bfloat16 else FP16_PAIR
        wide = tl.inline_asm_elementwise(
            pair, "=r,=r,r,r,r", [x, zero], dtype=tl.float32, is_pure=True, pack=2
        )
    return wide.to(tl.float32)


@triton.jit
def settled(x, FAST: tl.constexpr):
    """``x``, computed here: sums over rows would be put off to the end of a row otherwise, and what
    they are made of would stay in registers until then."""
    found = x
    if FAST:
        found = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=False, pack=1
        )
    return found


@triton.jit
def place_of(row, column, zero, D: tl.constexpr, BE: tl.constexpr):
    place = (row * D + column) ^ zero
    if D % BE == 0:
        place = tl.max_contiguous(tl.multiple_of(place, (1, BE)), (1, BE))
    return place


@triton.jit
def load_weight(weight, column, D: tl.constexpr):
    return tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
