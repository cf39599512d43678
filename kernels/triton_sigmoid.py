"""The sigmoid that kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def reciprocal(x, FAST: tl.constexpr):
    """``FAST`` takes that of the hardware (1 ulp), which the interpreter lacks."""
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    """In fp32; ``FAST`` as in `reciprocal`."""
    return reciprocal(1.0 + tl.exp2(x * -1.4426950408889634), FAST)


@triton.jit
def sigmoid_slope(x, FAST: tl.constexpr):
    """Derivative of `sigmoid`, without the difference 1 - s, which cancels where s is near 1."""
    closing = tl.exp2(tl.minimum(x * -1.4426950408889634, 126.0))  # no more than has a reciprocal
    opened = reciprocal(1.0 + closing, FAST)
    return closing * opened * opened
