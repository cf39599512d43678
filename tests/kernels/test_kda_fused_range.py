"""The GPU kernels of KDA far from the usual: in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import math
import os

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are decorated, below

from farhorizon.kernels.kda import fused, naive_kda  # noqa: E402
from farhorizon.kernels.kda.tables import Options  # noqa: E402

os.environ.pop("TRITON_INTERPRET", None)

WIDTH = 64 if GPU else 16
DEVICE = "cuda" if GPU else "cpu"


def options(tokens: int, *, gate: bool, bound: float = -5.0) -> Options:
    return Options((0, tokens), WIDTH**-0.5, bound, True, gate, True)


@pytest.mark.parametrize("shift", [12.0, 25.0])
def test_a_closed_gate_keeps_the_digits_of_its_gradient(loops: None, shift: float) -> None:
    """1 - s has one digit at a logit of 15 and none at 25; s(1 - s) is 1.4e-11 there."""
    gen = torch.Generator().manual_seed(0)
    q, k, v, z = torch.randn(4, 20, 1, WIDTH, generator=gen, dtype=torch.float64)
    beta = torch.randn(20, 1, generator=gen, dtype=torch.float64)
    weight = torch.randn(20, 1, WIDTH, generator=gen, dtype=torch.float64)
    z = (z + shift).requires_grad_()
    dt_bias = torch.zeros(WIDTH, dtype=torch.float64, requires_grad=True)
    out, _ = naive_kda(
        *(x[None] for x in (q, k, v, z, beta)),
        A_log=torch.zeros(1).double(),
        dt_bias=dt_bias,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    )
    expected = torch.autograd.grad(out[0], [z, dt_bias], weight)
    q, k, v, beta, weight = (x.float().to(DEVICE) for x in (q, k, v, beta, weight))
    z, dt_bias = (x.detach().float().to(DEVICE).requires_grad_() for x in (z, dt_bias))
    a_log, given = torch.zeros(1, device=DEVICE), options(20, gate=True)
    out, _ = fused.chunk_kda_fused(q, k, v, z, beta, a_log, dt_bias, None, False, given)
    for a, b in zip(torch.autograd.grad(out, [z, dt_bias], weight), expected, strict=True):
        assert float((a.double().cpu() - b).norm() / b.norm()) < 1e-4


def test_rows_that_cannot_be_copied_in_blocks_are_moved() -> None:
    """`contiguous` leaves a contiguous tensor at an odd address, and the stride of a single row."""
    base = torch.arange(1.0, 2000.0, dtype=torch.bfloat16)
    shifted = base[1:513].view(2, 2, 128)
    single = (
        base[:1536].view(3, 512)[:1, :256].view(1, 2, 128).as_strided((1, 2, 128), (513, 128, 1))
    )
    assert shifted.is_contiguous() and single.is_contiguous()
    for x in (shifted, single, base[:256].view(1, 2, 128).expand(4, 2, 128)):
        moved = fused.rows_aligned(x)
        assert torch.equal(moved, x)
        assert moved.data_ptr() % 16 == 0 and moved.stride() == (256, 128, 1)
    beside = base[:1536].view(2, 3, 2, 128)[:, 1]  # q, k and v of a token in one row
    assert fused.rows_aligned(beside) is beside


def test_decays_that_the_kernels_do_not_take_are_named_in_anomaly_mode() -> None:
    x = torch.zeros(4, 1, WIDTH, device=DEVICE)
    given = options(4, gate=False, bound=-0.3)
    low = torch.full_like(x, -0.31)
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.raises(ValueError, match=r"lower_bound -0\.3"),
    ):
        fused.chunk_kda_fused(x, x, x, low, x[..., 0], None, None, None, False, given)


def test_the_bound_itself_may_be_rounded_to_16_bits(loops: None) -> None:
    """-0.3 in bf16 is -0.30078: it counts as within the bound in both passes."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 20, 1, WIDTH, generator=gen).to(DEVICE)
    g = torch.full_like(q, -0.3).bfloat16().float()
    assert float(g[0, 0, 0]) < -0.3007
    leaves = [x.requires_grad_() for x in (q, k, v, g)]
    given = options(20, gate=False, bound=-0.3)
    with torch.autograd.set_detect_anomaly(True):
        out, _ = fused.chunk_kda_fused(q, k, v, g, v[..., 0], None, None, None, False, given)
        grads = torch.autograd.grad(out.sum(), leaves)
    assert all(math.isfinite(float(x.sum())) for x in grads)
