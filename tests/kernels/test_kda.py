"""KDA: chunked and recurrent forms against the token recurrence; gates, states, gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from farhorizon.kernels.kda import blocks as kda_blocks
from farhorizon.kernels.kda import chunk_kda, kda_gate, naive_kda, recurrent_kda
from farhorizon.kernels.kda.naive import query_scale

HEADS, WIDTH, VALUE = 2, 8, 4
FLAGS: dict[str, bool] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of three chunks: states go from one to the next, and groups from one to the next."""
    monkeypatch.setattr(kda_blocks, "BLOCK", 3 * kda_blocks.CHUNK * HEADS * WIDTH)
    kda_blocks.plan.cache_clear()
    yield
    kda_blocks.plan.cache_clear()


def inputs(
    length: int, batch: int = 1, seed: int = 0, gate_shift: float = 0.0
) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    q, k, z = (draw(batch, length, HEADS, WIDTH) for _ in range(3))
    v, beta = draw(batch, length, HEADS, VALUE), draw(batch, length, HEADS)
    a_log, dt_bias = draw(HEADS) * 0.3, draw(HEADS * WIDTH)
    return {
        "q": q,
        "k": k,
        "v": v,
        "g": z + gate_shift,
        "beta": beta,
        "A_log": a_log,
        "dt_bias": dt_bias,
    }


def run(
    form: Callable[..., tuple[torch.Tensor, torch.Tensor | None]], **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and final state of one form."""
    out, final = form(**arguments, output_final_state=True)
    assert final is not None
    return out, final


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(((a - b).norm() / b.norm().clamp(min=1e-30)).detach())


def test_bounded_gate_is_a_scaled_sigmoid():
    z = torch.tensor([-3.0, 0.0, 3.0]).view(1, 3, 1, 1)
    g = kda_gate(z, torch.zeros(1), torch.zeros(1), lower_bound=-5.0).flatten()
    torch.testing.assert_close(g, torch.tensor([-0.237129, -2.5, -4.762871]), atol=1e-6, rtol=0)
    assert abs(float(g[1].exp()) - 0.082085) < 1e-6


def test_unbounded_gate_is_a_negative_softplus():
    z = torch.tensor([0.5]).view(1, 1, 1, 1)
    g = kda_gate(z, torch.tensor([0.7]), torch.tensor([0.1]), lower_bound=None)
    expected = -torch.tensor(0.7).exp() * torch.log1p(torch.tensor(0.6).exp())
    torch.testing.assert_close(g.flatten(), expected.view(1))


def test_gate_stays_in_range_and_differentiable_at_extremes():
    z = torch.tensor([-10.0, 10.0]).view(1, 2, 1, 1).requires_grad_()
    a_log = torch.tensor([20.0], requires_grad=True)
    g = kda_gate(z, a_log, torch.zeros(1))
    assert bool(((g >= -5) & (g <= 0)).all())
    g.sum().backward()
    for leaf in (z, a_log):
        assert leaf.grad is not None and bool(torch.isfinite(leaf.grad).all())


def test_naive_form_by_hand():
    """Two tokens, one head of width one: S = 0.5 * 2, then S = 0.25 S + 0.5 * 3 (1 - ...)."""
    one = torch.ones(1, 2, 1, 1, dtype=torch.float64)
    v = torch.tensor([2.0, 3.0], dtype=torch.float64).view(1, 2, 1, 1)
    g = torch.tensor([0.0, 0.25], dtype=torch.float64).log().clamp(min=-50).view(1, 2, 1, 1)
    beta = torch.full((1, 2, 1), 0.5, dtype=torch.float64)
    out, state = run(naive_kda, q=one, k=one, v=v, g=g, beta=beta, scale=1.0)
    first = 0.5 * 2.0
    second = 0.25 * first + 0.5 * (3.0 - 0.25 * first)
    torch.testing.assert_close(out.flatten(), torch.tensor([first, second], dtype=torch.float64))
    assert float(state) == pytest.approx(second)


@pytest.mark.parametrize("bound", [-5.0, -1.0, None])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 65, 128])
def test_chunked_and_recurrent_equal_naive_with_gradients(length, bound):
    data = inputs(length)
    state = torch.randn(1, HEADS, WIDTH, VALUE, dtype=torch.float64)
    results = []
    for form in (naive_kda, chunk_kda, recurrent_kda):
        leaves = {k: v.clone().requires_grad_() for k, v in data.items()}
        start = state.clone().requires_grad_()
        out, final = run(form, **leaves, **FLAGS, lower_bound=bound, initial_state=start)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        ((out * weight).sum() + (final * 0.3).sum()).backward()
        results.append([out, final, start.grad, *(x.grad for x in leaves.values())])
    for other in results[1:]:
        for got, expected in zip(other, results[0], strict=True):
            assert relative(got, expected) < 1e-11


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_gradients_of_every_option_equal_those_of_the_recurrence(norm, sigmoid, scale):
    """Packed, with sequences of no, one and many tokens, and writes of strength 0."""
    data = inputs(90)
    if not norm:
        data["k"] = torch.nn.functional.normalize(data["k"], dim=-1)
    if not sigmoid:
        data["beta"] = data["beta"].sigmoid()
        data["beta"][:, ::7] = 0
    edges = torch.tensor([0, 33, 33, 34, 90, 90])
    start = torch.randn(5, HEADS, WIDTH, VALUE, dtype=torch.float64)
    flags = dict(zip(FLAGS, (norm, True, sigmoid), strict=True))
    results = []
    for form in (naive_kda, chunk_kda):
        leaves = {
            k: v.clone().requires_grad_() for k, v in (data | {"initial_state": start}).items()
        }
        out, final = run(form, **leaves, **flags, scale=scale, cu_seqlens=edges)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        ((out * weight).sum() + (final * final).sum()).backward()
        results.append([out, final, *(x.grad for x in leaves.values())])
    for got, expected in zip(*reversed(results), strict=True):
        assert relative(got, expected) < 1e-11


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("sigmoid", [True, False])
def test_gradients_pass_gradcheck(norm, sigmoid):
    flags = dict(zip(FLAGS, (norm, True, sigmoid), strict=True))
    data = {k: v.requires_grad_() for k, v in inputs(18, batch=2).items()}
    state = torch.randn(2, HEADS, WIDTH, VALUE, dtype=torch.float64, requires_grad=True)

    def form(*values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        *rest, start = values
        return run(chunk_kda, **dict(zip(data, rest, strict=True)), **flags, initial_state=start)

    assert torch.autograd.gradcheck(form, (*data.values(), state), fast_mode=True)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "g", "beta", "A_log", "dt_bias"])
def test_one_input_alone_has_the_gradient_it_has_among_all(wanted):
    leaves = {k: v.requires_grad_() for k, v in inputs(20).items()}
    run(chunk_kda, **leaves, **FLAGS)[0].square().sum().backward()
    alone = {k: v.detach().requires_grad_(k == wanted) for k, v in leaves.items()}
    run(chunk_kda, **alone, **FLAGS)[0].square().sum().backward()
    assert all((x.grad is None) == (name != wanted) for name, x in alone.items())
    torch.testing.assert_close(alone[wanted].grad, leaves[wanted].grad, atol=0, rtol=0)


def test_the_final_state_alone_has_gradients():
    results = []
    for form in (naive_kda, chunk_kda):
        leaves = {k: v.requires_grad_() for k, v in inputs(20).items()}
        run(form, **leaves, **FLAGS)[1].square().sum().backward()
        results.append([x.grad for name, x in leaves.items() if name != "q"])
    for got, expected in zip(*reversed(results), strict=True):
        assert relative(got, expected) < 1e-11


def test_inputs_seen_through_strides_and_in_16_bits_have_their_gradients():
    """As the layer gives them: q, k and v side by side, in bf16, the parameters in fp32."""
    data = {k: v.bfloat16() for k, v in inputs(37).items()}
    data |= {k: data[k].float() for k in ("A_log", "dt_bias")}
    wide = {k: v.double().requires_grad_() for k, v in data.items()}
    joined = torch.stack([data["q"], data["k"]], 2).requires_grad_()
    q, k = joined.unbind(2)
    leaves = {k: v.requires_grad_() for k, v in data.items() if k not in ("q", "k")}
    out, _ = run(chunk_kda, q=q, k=k, **leaves, **FLAGS)
    expected, _ = run(naive_kda, **wide, **FLAGS)
    assert out.dtype == torch.bfloat16 and relative(out.double(), expected) < 4e-3
    out.sum().backward()
    expected.sum().backward()
    assert joined.grad is not None
    grads = {k: v.grad for k, v in leaves.items()} | dict(
        zip("qk", joined.grad.unbind(2), strict=True)
    )
    for name, leaf in wide.items():
        grad = grads[name]
        assert grad is not None and leaf.grad is not None and grad.dtype == data[name].dtype
        assert relative(grad.double(), leaf.grad) < 4e-3, name


def test_no_tokens_pass_the_gradient_of_the_state_on():
    data = {k: v.requires_grad_() for k, v in inputs(0).items()}
    state = torch.randn(1, HEADS, WIDTH, VALUE, dtype=torch.float64, requires_grad=True)
    out, final = run(chunk_kda, **data, **FLAGS, initial_state=state)
    assert out.shape == data["v"].shape and torch.equal(final, state)
    (final * 2).sum().backward()
    assert state.grad is not None and torch.equal(state.grad, torch.full_like(state, 2))
    assert data["A_log"].grad is not None and not data["A_log"].grad.any()


def test_autocast_rounds_nothing():
    leaves = {k: v.float().requires_grad_() for k, v in inputs(20).items()}
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out, final = run(chunk_kda, **leaves, **FLAGS)
            loss = out.square().sum() + final.sum()
            results.append([out, final, *torch.autograd.grad(loss, list(leaves.values()))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_sequence_alone_is_itself_in_a_pack_to_the_bit():
    lengths = [5, 150, 16, 70, 0, 151]
    edges = [0, *itertools.accumulate(lengths)]
    data = {k: v.float() for k, v in inputs(edges[-1]).items()}
    shared = {k: data.pop(k) for k in ("A_log", "dt_bias")}
    packed = {k: v.clone().requires_grad_() for k, v in data.items()}
    out, final = run(chunk_kda, **packed, **shared, **FLAGS, cu_seqlens=torch.tensor(edges))
    out.square().sum().backward()
    for n, (a, b) in enumerate(itertools.pairwise(edges)):
        piece = {k: v[:, a:b].clone().requires_grad_() for k, v in data.items()}
        alone, end = run(chunk_kda, **piece, **shared, **FLAGS)
        assert torch.equal(alone, out[:, a:b]) and torch.equal(end[0], final[n])
        alone.square().sum().backward()
        for name, x in piece.items():
            whole = packed[name].grad
            assert whole is not None and x.grad is not None
            assert torch.equal(x.grad, whole[:, a:b]), name


def test_what_is_not_finite_stays_in_its_sequence():
    data = {k: v.float() for k, v in inputs(50).items()}
    clean, _ = run(chunk_kda, **data, **FLAGS, cu_seqlens=torch.tensor([0, 19, 50]))
    for name in ("q", "k", "v", "g", "beta"):
        data[name][:, 18] = torch.nan
    out, final = run(chunk_kda, **data, **FLAGS, cu_seqlens=torch.tensor([0, 19, 50]))
    assert torch.equal(out[:, :16], clean[:, :16])  # the chunks before, and the next sequence
    assert torch.equal(out[:, 19:], clean[:, 19:])
    assert bool(final[0].isnan().all()) and bool(final[1].isfinite().all())


def test_every_gate_at_the_bound_is_exact_and_finite():
    data = inputs(64, gate_shift=1e4)
    leaves = {k: v.float().requires_grad_() for k, v in data.items()}
    out, final = run(chunk_kda, **leaves, **FLAGS)
    expected, expected_final = run(naive_kda, **data, **FLAGS)
    assert relative(out.double(), expected) < 1e-5
    assert relative(final.double(), expected_final) < 1e-5
    out.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in leaves.values())


def test_a_given_decay_below_every_bound_is_exact_and_finite():
    """-8 over a chunk of 16 tokens: e^128, which the tile form of the bounded gate cannot hold."""
    data = {k: v for k, v in inputs(40).items() if k not in ("A_log", "dt_bias")}
    data["g"] = torch.full_like(data["g"], -8.0)
    data["beta"] = data["beta"].sigmoid()
    leaves = {k: v.float().requires_grad_() for k, v in data.items()}
    out, final = run(chunk_kda, **leaves, use_qk_l2norm_in_kernel=True)
    expected, expected_final = run(naive_kda, **data, use_qk_l2norm_in_kernel=True)
    assert relative(out.double(), expected) < 1e-5
    assert relative(final.double(), expected_final) < 1e-5
    out.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in leaves.values())


def test_repeated_keys_with_strong_writes_stay_exact():
    data = inputs(48)
    data["k"] = data["k"][:, :1].expand_as(data["k"])
    data["beta"] = torch.full_like(data["beta"], 8.0)
    single = {k: v.float() for k, v in data.items()}
    out, _ = run(chunk_kda, **single, **FLAGS)
    assert relative(out.double(), run(naive_kda, **data, **FLAGS)[0]) < 1e-5


@pytest.mark.parametrize("form", [naive_kda, chunk_kda])
def test_packed_equals_alone_and_order_does_not_matter(form):
    lengths = [5, 33, 1, 16]
    data = inputs(sum(lengths))
    state = torch.randn(4, HEADS, WIDTH, VALUE, dtype=torch.float64)
    edges = [0, 5, 38, 39, 55]
    shared = {k: data.pop(k) for k in ("A_log", "dt_bias")}
    out, final = run(
        form, **data, **shared, **FLAGS, initial_state=state, cu_seqlens=torch.tensor(edges)
    )
    for n, (a, b) in enumerate(itertools.pairwise(edges)):
        piece = {k: v[:, a:b] for k, v in data.items()}
        alone, end = run(form, **piece, **shared, **FLAGS, initial_state=state[n : n + 1])
        torch.testing.assert_close(out[:, a:b], alone, atol=1e-12, rtol=1e-10)
        torch.testing.assert_close(final[n], end[0], atol=1e-12, rtol=1e-10)
    order = [2, 0, 3, 1]
    mixed = {
        k: torch.cat([v[:, edges[i] : edges[i + 1]] for i in order], 1) for k, v in data.items()
    }
    bounds = torch.tensor([0, *lengths_of(lengths, order)]).cumsum(0)
    shuffled, _ = form(**mixed, **shared, **FLAGS, initial_state=state[order], cu_seqlens=bounds)
    expected = torch.cat([out[:, edges[i] : edges[i + 1]] for i in order], 1)
    torch.testing.assert_close(shuffled, expected, atol=1e-12, rtol=1e-10)


def lengths_of(lengths: list[int], order: list[int]) -> list[int]:
    return [lengths[i] for i in order]


@pytest.mark.parametrize("cut", [1, 16, 20, 39])
def test_split_anywhere_with_carried_state_equals_one_pass(cut):
    data = inputs(40)
    shared = {k: data.pop(k) for k in ("A_log", "dt_bias")}
    parts = [{k: v[:, a:b] for k, v in data.items()} for a, b in ((0, cut), (cut, 40))]
    whole, end = run(chunk_kda, **data, **shared, **FLAGS)
    left, state = run(chunk_kda, **parts[0], **shared, **FLAGS)
    right, final = run(chunk_kda, **parts[1], **shared, **FLAGS, initial_state=state)
    torch.testing.assert_close(torch.cat([left, right], 1), whole, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(final, end, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("form", [chunk_kda, recurrent_kda, naive_kda])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"lower_bound": -6.0}, "lower_bound"),
        ({"lower_bound": 0.0}, "lower_bound"),
        ({"cu_seqlens": torch.tensor([0, 5, 3, 8])}, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0, 7])}, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0.0, 8.0])}, "cu_seqlens must be int32 or int64"),
        ({"cu_seqlens": torch.tensor([[0, 8]])}, "cu_seqlens must be int32 or int64"),
        ({"cu_seqlens": torch.tensor([], dtype=torch.int64)}, "cu_seqlens must rise"),
        ({"q": torch.zeros(8, HEADS, WIDTH)}, "q must be"),
        ({"v": torch.zeros(1, 8, HEADS)}, "v must be"),
        ({"v": torch.zeros(1, 8, HEADS, 0)}, "v must be"),
        ({"v": torch.zeros(1, 7, HEADS, VALUE)}, r"v has shape \(1, 7, 2, 4\), .* \(1, 8, 2, 4\)"),
        ({"initial_state": torch.zeros(2, HEADS, WIDTH, VALUE)}, "initial_state"),
        ({"beta": torch.zeros(1, 7, HEADS)}, "beta"),
        ({"k": torch.zeros(1, 8, HEADS, WIDTH + 1)}, "k has shape"),
        ({"A_log": None}, "A_log"),
        ({"cu_seqlens": [0, 8]}, "cu_seqlens must be an int32 or int64 tensor .*, got a list"),
        ({"v": torch.zeros(1, 8, HEADS, VALUE, dtype=torch.int64)}, "v must be of a real float"),
        ({"q": torch.zeros(1, 8, HEADS, WIDTH, dtype=torch.complex64)}, "q must be of a real"),
        ({"k": torch.zeros(1, 8, HEADS, WIDTH, device="meta")}, "k is on meta, expected cpu"),
        ({"A_log": torch.zeros(HEADS, device="meta")}, "A_log is on meta"),
        ({"initial_state": torch.zeros(1, HEADS, WIDTH, VALUE, device="meta")}, "initial_state is"),
        (
            {"initial_state": torch.zeros(1, HEADS, WIDTH, VALUE, dtype=torch.int64)},
            "initial_state must be of a real float",
        ),
    ],
)
def test_wrong_arguments_are_named(form, change, named):
    with pytest.raises(ValueError, match=named):
        run(form, **(inputs(8) | FLAGS | change))


def test_the_gate_names_a_logit_without_heads():
    with pytest.raises(ValueError, match=r"z must be \[\.\.\., H, K\]"):
        kda_gate(torch.zeros(8), torch.zeros(1), torch.zeros(8))


def test_numbers_of_numpy_are_numbers():
    data = inputs(8)
    numbers = run(chunk_kda, **data, **FLAGS, scale=np.float64(0.5), lower_bound=np.float32(-4))
    assert torch.equal(numbers[0], run(chunk_kda, **data, **FLAGS, scale=0.5, lower_bound=-4.0)[0])
    assert type(query_scale(np.float64(0.5), 64)) is float and query_scale(None, 64) == 0.125


@pytest.mark.slow
def test_compiled_code_may_call_it():
    leaves = {k: v.requires_grad_() for k, v in inputs(40).items()}

    def loss(given: dict[str, torch.Tensor]) -> torch.Tensor:
        out, final = run(chunk_kda, **given, **FLAGS)
        return out.square().sum() + final.sum()

    found = torch.compile(loss, backend="aot_eager")(leaves)
    for got, expected in zip(
        torch.autograd.grad(found, list(leaves.values())),
        torch.autograd.grad(loss(leaves), list(leaves.values())),
        strict=True,
    ):
        assert relative(got, expected) < 1e-12


@pytest.mark.parametrize("form", [chunk_kda, naive_kda, recurrent_kda])
def test_no_tokens_leave_the_state_alone(
    form: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
) -> None:
    empty = torch.zeros(1, 0, HEADS, WIDTH)
    state = torch.randn(1, HEADS, WIDTH, VALUE)
    values = torch.zeros(1, 0, HEADS, VALUE)
    beta = torch.zeros(1, 0, HEADS)
    out, final = run(form, q=empty, k=empty, v=values, g=empty, beta=beta, initial_state=state)
    assert out.shape == values.shape and torch.equal(final, state)
