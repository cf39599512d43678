"""KDA on the GPU in 16 bits, through the public function: accuracy, invariance, determinism."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farhorizon.kernels.kda import chunk_kda, naive_kda

pytestmark = pytest.mark.gpu

FLAGS: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
# Relative error allowed against fp64 on the same 16-bit inputs. The last two are sums over tokens,
# of terms that may cancel: their errors are relative to the larger of sum and terms.
ALLOWED = {"q": 5e-3, "k": 5e-3, "v": 5e-3, "g": 6e-3, "beta": 6e-3, "A_log": 1e-2, "dt_bias": 6e-3}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def draw(
    tokens: int, heads: int, *, width: int = 128, seed: int = 0, shift: float = 0.0
) -> dict[str, torch.Tensor]:
    gen = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, device="cuda")

    found = {name: normal(1, tokens, heads, width).bfloat16() for name in ("q", "k", "v", "g")}
    found["g"] = found["g"] + shift
    found["beta"] = normal(1, tokens, heads).bfloat16()
    found["A_log"], found["dt_bias"] = normal(heads) * 0.3, normal(heads * width)
    return found


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())


@pytest.mark.parametrize("shift", [0.0, 6.0, -6.0])
@pytest.mark.parametrize(
    ("width", "dtype"), [(128, "bfloat16"), (64, "bfloat16"), (128, "float16")]
)
def test_errors_stay_below_those_of_the_16_bit_inputs(shift: float, width: int, dtype: str) -> None:
    bounds = torch.tensor([0, 65, 65, 66, 300])
    inputs = draw(300, 2, width=width, shift=shift)
    if dtype == "float16":
        inputs = {n: x.half() if x.dtype == torch.bfloat16 else x for n, x in inputs.items()}
    state = torch.randn(4, 2, width, width, device="cuda") * 0.3
    narrow = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    wide = {name: x.double().requires_grad_() for name, x in inputs.items()}
    s, t = state.clone().requires_grad_(), state.double().requires_grad_()
    rest: dict[str, Any] = {"cu_seqlens": bounds, "output_final_state": True, **FLAGS}
    out, final = chunk_kda(**narrow, initial_state=s, **rest)
    expected, expected_final = naive_kda(**wide, initial_state=t, **rest)
    assert final is not None and expected_final is not None and final.dtype == torch.float32
    d_out, d_final = torch.randn_like(out), torch.randn_like(final) * 0.1
    torch.autograd.backward([out, final], [d_out, d_final])
    torch.autograd.backward([expected, expected_final], [d_out.double(), d_final.double()])
    assert relative(out, expected) < 4e-3
    assert relative(final, expected_final) < 4e-3
    assert s.grad is not None and t.grad is not None and relative(s.grad, t.grad) < 5e-3
    d_gate = wide["g"].grad
    assert d_gate is not None
    terms = {
        "A_log": d_gate * (wide["g"] + wide["dt_bias"].view(2, width)).detach(),
        "dt_bias": d_gate,
    }
    for name in NAMES:
        a, b = narrow[name].grad, wide[name].grad
        assert a is not None and b is not None
        size = max(b.norm(), terms.get(name, b).norm())
        error = float((a.double() - b).norm() / size)
        assert error < ALLOWED[name], name


def test_gate_gradient_has_four_roundings() -> None:
    """Of 1.64e-3 each at random decays (see `triton_grad`), 3.3e-3 in all; a fifth makes 3.7e-3."""
    inputs = draw(1024, 4)
    inputs["A_log"], inputs["dt_bias"] = (torch.zeros_like(inputs[n]) for n in NAMES[5:])
    narrow = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    wide = {name: x.double().requires_grad_() for name, x in inputs.items()}
    out, expected = chunk_kda(**narrow, **FLAGS)[0], naive_kda(**wide, **FLAGS)[0]
    d_out = torch.randn_like(out)
    out.backward(d_out)
    expected.backward(d_out.double())
    assert narrow["g"].grad is not None and wide["g"].grad is not None
    assert relative(narrow["g"].grad, wide["g"].grad) < 3.5e-3


def test_gate_gradient_at_the_bound() -> None:
    inputs = draw(256, 2)
    inputs["g"] = torch.full_like(inputs["g"], -5.0)
    given = {name: inputs[name] for name in ("q", "k", "v", "g", "beta")}
    flags: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    narrow = {name: x.clone().requires_grad_() for name, x in given.items()}
    wide = {name: x.double().requires_grad_() for name, x in given.items()}
    out, expected = chunk_kda(**narrow, **flags)[0], naive_kda(**wide, **flags)[0]
    d_out = torch.randn_like(out)
    out.backward(d_out)
    expected.backward(d_out.double())
    assert narrow["g"].grad is not None and wide["g"].grad is not None
    assert relative(narrow["g"].grad, wide["g"].grad) < 5e-3


def test_a_sequence_has_the_same_bits_alone_packed_and_with_more_after_it() -> None:
    inputs = draw(700, 4)
    tokens = ("q", "k", "v", "g", "beta")

    def part(start: int, end: int) -> dict[str, torch.Tensor]:
        return {n: (x[:, start:end] if n in tokens else x) for n, x in inputs.items()}

    def gradients(start: int, end: int, bounds: list[int], sequence: int) -> list[torch.Tensor]:
        leaves = {n: x.clone().requires_grad_() for n, x in part(start, end).items()}
        out, _ = chunk_kda(**leaves, cu_seqlens=torch.tensor(bounds), **FLAGS)
        a, b = bounds[sequence], bounds[sequence] + 90
        out[:, a:b].float().square().sum().backward()
        found = [out[:, a:b].detach()]
        for name in tokens:
            grad = leaves[name].grad
            assert grad is not None
            found.append(grad[:, a:b])
        return found

    alone = gradients(210, 300, [0, 90], 0)
    for other in (
        gradients(0, 700, [0, 210, 300, 700], 1),
        gradients(210, 400, [0, 190], 0),  # tokens appended
        gradients(0, 700, [0, 210, 700], 1),
    ):
        for name, a, b in zip(("out", *tokens), alone, other, strict=True):
            assert torch.equal(a, b), name


def test_a_neighbour_full_of_nan_does_not_leak() -> None:
    """Into a sequence before it in the same tile of tokens, nor into one behind it."""
    inputs = draw(200, 2)
    tokens = ("q", "k", "v", "g", "beta")
    bounds, kept = torch.tensor([0, 70, 115, 200]), [*range(70), *range(115, 200)]
    state = torch.randn(3, 2, 128, 128, device="cuda")
    d_out = torch.randn_like(inputs["v"])
    results: list[list[torch.Tensor]] = []
    for broken in (False, True):
        given = {n: x.clone() for n, x in inputs.items()}
        start, upstream = state.clone(), d_out.clone()
        if broken:
            for x in (*(given[n] for n in tokens), upstream):
                x[:, 70:115] = float("nan")
            start[1] = float("nan")
        leaves = {n: x.requires_grad_() for n, x in given.items()}
        out, final = chunk_kda(
            **leaves, **FLAGS, cu_seqlens=bounds, initial_state=start, output_final_state=True
        )
        assert final is not None
        grads = torch.autograd.grad(out, [leaves[n] for n in tokens], upstream)
        results.append([x[:, kept] for x in (out, *grads)] + [final[[0, 2]]])
    for name, a, b in zip(("out", *tokens, "final"), *results, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("shift", [0.0, -30.0])
def test_equal_keys_with_full_strength_stay_accurate(shift: float) -> None:
    """A repeated token: powers of the triangular matrix would grow without end."""
    inputs = draw(200, 2, shift=shift)
    inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"])
    inputs["beta"] = inputs["beta"] + 8
    out, final = chunk_kda(**inputs, **FLAGS, output_final_state=True)
    expected, last = naive_kda(
        **{n: x.double() for n, x in inputs.items()}, **FLAGS, output_final_state=True
    )
    assert final is not None and last is not None
    assert relative(out, expected) < 2e-2 and relative(final, last) < 2e-2


def test_one_token_at_an_odd_address_and_stride() -> None:
    inputs = draw(1, 2)
    expected, _ = chunk_kda(**inputs, **FLAGS)
    for offset, stride in ((0, 259), (3, 256)):
        moved = dict(inputs)
        for name in ("q", "k", "v", "g"):
            space = torch.zeros(offset + stride, dtype=torch.bfloat16, device="cuda")
            moved[name] = space.as_strided((1, 1, 2, 128), (stride, stride, 128, 1), offset)
            moved[name].copy_(inputs[name])
        assert torch.equal(chunk_kda(**moved, **FLAGS)[0], expected)


def test_more_elements_than_32_bits_count() -> None:
    """The last sequence lies behind element 2^31 of every tensor, both passes through."""
    if torch.cuda.mem_get_info()[0] < 115e9:
        pytest.skip("needs 115 GB")
    tokens, heads, last = 525_000, 32, 200
    assert (tokens - last) * heads * 128 > 2**31
    gen = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(
        1, tokens, heads, 128, generator=gen, device="cuda", dtype=torch.bfloat16
    ).requires_grad_()
    beta = torch.randn(1, tokens, heads, generator=gen, device="cuda").bfloat16()
    gate = {"A_log": torch.zeros(heads).cuda(), "dt_bias": torch.zeros(heads * 128).cuda()}
    bounds = torch.tensor([0, tokens - last, tokens])
    out, _ = chunk_kda(x, x, x, x, beta, **gate, **FLAGS, cu_seqlens=bounds)
    d_out = torch.zeros_like(out)
    d_out[:, -last:].normal_(generator=gen)
    (grad,) = torch.autograd.grad(out, x, d_out)
    tail = x.detach()[:, -last:].clone().requires_grad_()
    alone, _ = chunk_kda(tail, tail, tail, tail, beta[:, -last:], **gate, **FLAGS)
    (expected,) = torch.autograd.grad(alone, tail, d_out[:, -last:])
    assert torch.equal(out[:, -last:], alone) and torch.equal(grad[:, -last:], expected)


def test_a_given_decay_at_a_bound_that_16_bits_round() -> None:
    """-0.3 in bf16 is -0.30078, and counts as within the bound in both passes."""
    inputs = draw(100, 2)
    given = {name: inputs[name] for name in ("q", "k", "v", "g", "beta")}
    given["g"] = torch.full_like(given["g"], -0.3)
    flags: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    narrow = {name: x.clone().requires_grad_() for name, x in given.items()}
    wide = {name: x.double().requires_grad_() for name, x in given.items()}
    out = chunk_kda(**narrow, **flags, lower_bound=-0.3)[0]
    expected = naive_kda(**wide, **flags, lower_bound=-0.3)[0]
    d_out = torch.randn_like(out)
    out.backward(d_out)
    expected.backward(d_out.double())
    for name, leaf in narrow.items():
        other = wide[name].grad
        assert leaf.grad is not None and other is not None
        assert relative(leaf.grad, other) < ALLOWED[name], name


def test_repeats_have_the_same_bits() -> None:
    inputs = {n: x.requires_grad_() for n, x in draw(2000, 16).items()}
    first: list[torch.Tensor] = []
    for _ in range(100):
        out, _ = chunk_kda(**inputs, cu_seqlens=torch.tensor([0, 700, 2000]), **FLAGS)
        found = [out, *torch.autograd.grad(out.float().square().sum(), list(inputs.values()))]
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))


def test_pieces_with_carried_state_have_the_bits_of_one_pass() -> None:
    inputs = draw(320, 4)
    whole, final = chunk_kda(**inputs, output_final_state=True, **FLAGS)
    state, outs = None, []
    for start, end in ((0, 64), (64, 192), (192, 320)):
        piece = {n: (x[:, start:end] if x.dim() > 2 else x) for n, x in inputs.items()}
        out, state = chunk_kda(**piece, initial_state=state, output_final_state=True, **FLAGS)
        outs.append(out)
    assert final is not None and state is not None
    assert torch.equal(torch.cat(outs, 1), whole) and torch.equal(state, final)


@pytest.mark.parametrize("heads", [4, 32])
def test_passes_that_overlap_change_no_bit(heads: int) -> None:
    """A long sequence of few heads alone is cut into pieces, in a pack it is not."""
    inputs = draw(9000, heads)
    sequence = {n: (x[:, :8190] if x.dim() > 2 else x) for n, x in inputs.items()}
    d_out = torch.randn_like(sequence["v"])

    def both(given: dict[str, torch.Tensor], bounds: list[int]) -> list[torch.Tensor]:
        leaves = {n: x.clone().requires_grad_() for n, x in given.items()}
        out, _ = chunk_kda(**leaves, cu_seqlens=torch.tensor(bounds), **FLAGS)
        out = out[:, :8190]
        names = ("q", "k", "v", "g", "beta")
        grads = torch.autograd.grad(out, [leaves[n] for n in names], d_out)
        return [out, *(x[:, :8190] for x in grads)]

    packed = both(inputs, [0, 8190, 9000])
    for _ in range(20):
        alone = both(sequence, [0, 8190])
        assert all(torch.equal(a, b) for a, b in zip(alone, packed, strict=True))


def test_a_long_sequence_of_few_heads_is_cut_in_time() -> None:
    """The same bits alone and in a pack, and the maps round no more than the passes do."""
    inputs = draw(40_000, 1, shift=-4.0)
    tokens = ("q", "k", "v", "g", "beta")
    d_out = torch.randn_like(inputs["v"])[:, :36_000]

    def results(length: int, bounds: list[int], few: bool) -> list[torch.Tensor]:
        given = {n: (x[:, :length] if n in tokens else x) for n, x in inputs.items()}
        if not few:  # more heads than are ever cut
            wide = {n: torch.cat([x] * 17, 2) for n, x in given.items() if n in tokens}
            given = wide | {n: torch.cat([given[n]] * 17) for n in ("A_log", "dt_bias")}
        leaves = {n: x.clone().requires_grad_() for n, x in given.items()}
        out, _ = chunk_kda(**leaves, cu_seqlens=torch.tensor(bounds), **FLAGS)
        grads = torch.autograd.grad(out[:, :36_000, :1], [leaves[n] for n in tokens], d_out)
        return [x[:, :36_000, :1] for x in (out, *grads)]

    alone = results(36_000, [0, 36_000], True)
    packed = results(40_000, [0, 36_000, 40_000], True)
    whole = results(36_000, [0, 36_000], False)
    for name, a, b, c in zip(("out", *tokens), alone, packed, whole, strict=True):
        assert torch.equal(a, b), name
        assert relative(a, c) < 5e-3, name


def test_batched_rows_equal_packed_sequences() -> None:
    inputs = draw(256, 2)
    batched = {n: (x.view(2, 128, *x.shape[2:]) if x.dim() > 2 else x) for n, x in inputs.items()}
    out, _ = chunk_kda(**batched, **FLAGS)
    packed, _ = chunk_kda(**inputs, cu_seqlens=torch.tensor([0, 128, 256]), **FLAGS)
    assert torch.equal(out.view_as(packed), packed)


def test_small_gradients_keep_their_precision() -> None:
    """A loss averaged over many tokens has gradients far below 1."""
    inputs = draw(256, 4, shift=-4.0)
    d_out = torch.randn(1, 256, 4, 128, device="cuda").bfloat16()
    grads = []
    for size in (1.0, 2.0**-40):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        out, _ = chunk_kda(**leaves, **FLAGS)
        found = torch.autograd.grad(out, list(leaves.values()), d_out * size)
        grads.append([x.double() / size for x in found])
    for name, a, b in zip(NAMES, *grads, strict=True):
        assert relative(b, a) < 1e-3, name
