"""The unbounded gate on a GPU: what flash-linear-attention is given, and what comes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from farhorizon.kernels.kda import chunk_kda, naive_kda
from farhorizon.kernels.kda.unbounded import checked, chunk_kda_unbounded, installed

FLAGS: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}
EDGES = (0, 21, 21, 22, 70)
ROWS = ("q", "k", "v", "g", "beta")


def theirs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    **kwargs: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The signature of fla-core 0.6, what it demands of its arguments, and the recurrence."""
    assert q.dtype == k.dtype == v.dtype and type(scale) is float
    assert initial_state is None or initial_state.dtype == torch.float32
    assert lower_bound is None and not safe_gate and not torch.is_autocast_enabled("cpu")
    assert (cu_seqlens is None) == (cu_seqlens_cpu is None)
    for edges in (cu_seqlens, cu_seqlens_cpu):
        assert edges is None or edges.dtype == torch.int64
    assert set(kwargs) <= {"A_log", "dt_bias"}
    return naive_kda(
        *(q, k, v, g, beta),
        A_log=kwargs["A_log"],
        dt_bias=kwargs["dt_bias"],
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        lower_bound=None,
        cu_seqlens=cu_seqlens,
    )


FLA = SimpleNamespace(chunk_kda=theirs)


def draw(width: int, *, device: str = "cpu", batch: int = 1) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(width)
    shapes = {
        **dict.fromkeys(("q", "k", "v", "g"), (batch, 70, 2, width)),
        "beta": (batch, 70, 2),
        "A_log": (2,),
        "dt_bias": (2 * width,),
        "initial_state": ((4 if batch == 1 else batch), 2, width, width),
    }
    made = {n: torch.randn(shape, generator=gen).to(device) for n, shape in shapes.items()}
    return {n: x.bfloat16() if n in ROWS else x for n, x in made.items()}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def call(data: dict[str, torch.Tensor], gate: bool, **rest: Any) -> Any:
    return chunk_kda_unbounded(
        FLA,
        (data["q"], data["k"], data["v"], data["g"], data["beta"]),
        (data["A_log"], data["dt_bias"]) if gate else (None, None),
        data["initial_state"],
        **({"bounds": EDGES, "final": True, "scale": 0.25, "norm": True, "sigmoid": True} | rest),
    )


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("flag", [True, False])
@torch.autocast("cpu", torch.bfloat16)
def test_every_argument_arrives(flag: bool, batch: int) -> None:
    """q, k and the state in other types than theirs takes, and under autocast, too."""
    data = draw(16, batch=batch)
    data |= {"q": data["q"].float(), "initial_state": data["initial_state"].bfloat16()}
    if not flag:
        data |= {"g": -data["g"].abs(), "beta": data["beta"].sigmoid()}
    bounds = EDGES if batch == 1 else None
    leaves = {n: x.clone().requires_grad_() for n, x in data.items()}
    out, final = call(leaves, flag, norm=flag, sigmoid=flag, bounds=bounds)
    wide = {n: x.clone().requires_grad_() for n, x in data.items()}
    wide_q = {**wide, "q": wide["q"].bfloat16()}
    flags: dict[str, Any] = dict.fromkeys(FLAGS, flag)
    expected, expected_final = naive_kda(
        **wide_q,
        **flags,
        scale=0.25,
        lower_bound=None,
        output_final_state=True,
        cu_seqlens=None if bounds is None else torch.tensor(bounds),
    )
    assert expected_final is not None
    assert torch.equal(out, expected) and torch.equal(final, expected_final)
    (out.float().sum() + final.square().sum()).backward()
    (expected.float().sum() + expected_final.square().sum()).backward()
    for name, leaf in leaves.items():
        if flag or name not in ("A_log", "dt_bias"):
            wanted = wide[name].grad
            assert leaf.grad is not None and wanted is not None
            assert leaf.grad.dtype == data[name].dtype
            assert torch.equal(leaf.grad, wanted), name


def test_the_final_state_comes_only_where_it_is_wanted() -> None:
    assert call(draw(16), True, final=False)[1] is None


@pytest.mark.parametrize("name", ["q", "v"])
def test_head_sizes_that_theirs_does_not_take_are_named(name: str) -> None:
    data = draw(16)
    wide = torch.zeros(1, 70, 2, 257, dtype=torch.bfloat16)
    given = data | ({"v": wide} if name == "v" else dict.fromkeys(("q", "k", "g"), wide))
    with pytest.raises(ValueError, match=rf"{name} has head size 257; .* up to 256"):
        call(given, True)


def test_a_version_that_would_pass_over_arguments_is_refused() -> None:
    def old(q: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return q

    with pytest.raises(ImportError, match=r"install 0\.6 or newer"):
        checked(SimpleNamespace(chunk_kda=old))
    assert checked(FLA) is FLA


@pytest.mark.gpu
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("width", [64, 128])
def test_theirs_is_the_recurrence(width: int, gate: bool) -> None:
    """Packed, with empty sequences, states and all gradients; and the errors are those of 16 bits,
    not of the fp32 that plain torch would compute in."""
    if installed() is None:
        pytest.skip("flash-linear-attention is not installed")
    data = draw(width, device="cuda")
    if not gate:
        data["g"] = -data["g"].abs()
    flags = FLAGS | {"use_gate_in_kernel": gate, "lower_bound": None, "output_final_state": True}
    results = []
    for form, kind in ((chunk_kda, None), (naive_kda, torch.double)):
        leaves = {n: x.to(kind or x.dtype, copy=True).requires_grad_() for n, x in data.items()}
        out, final = form(**leaves, **flags, cu_seqlens=torch.tensor(EDGES))
        assert final is not None
        weight = torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out)
        ((out * weight).sum() + (final * 0.1).sum()).backward()
        names = [n for n in leaves if gate or n not in ("A_log", "dt_bias")]
        results.append({"o": out, "state": final} | {n: leaves[n].grad for n in names})
    errors = {n: relative(x, results[1][n]) for n, x in results[0].items()}
    print({n: f"{error:.1e}" for n, error in errors.items()})
    # The gradient of A_log is a sum over tokens, of terms that cancel.
    assert all(error < (5e-2 if n == "A_log" else 2e-2) for n, error in errors.items()), errors
    assert errors["state"] > 1e-5, errors
