"""The sigmoid that kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    """In fp32; ``FAST`` takes the hardware's reciprocal (1 ulp), which the interpreter lacks."""
    below = 1.0 + tl.exp2(x * -1.4426950408889634)
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [below], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / below
