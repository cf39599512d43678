"""The GPU kernels of KDA: in Triton's interpreter where there is no GPU, else compiled."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are decorated, below

from farhorizon.kernels.kda import fused, naive_kda, segments, tables  # noqa: E402
from farhorizon.kernels.kda.tables import Options  # noqa: E402

os.environ.pop("TRITON_INTERPRET", None)

NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
WIDTH = 64 if GPU else 16
DEVICE = "cuda" if GPU else "cpu"


@pytest.fixture(autouse=True)
def seed(loops: None) -> None:
    torch.manual_seed(0)


def draw(
    tokens: int, sequences: int, *, seed: int = 0, shift: float = 0.0, heads: int = 2
) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    q, k, v, g = (normal(tokens, heads, WIDTH) for _ in range(4))
    rest = (normal(tokens, heads), normal(heads) * 0.3, normal(heads * WIDTH))
    return [q, k, v, g + shift, *rest, normal(sequences, heads, WIDTH, WIDTH) * 0.3]


def run(inputs: list[torch.Tensor], options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and final states in fp32 arithmetic."""
    q, k, v, g, beta, a_log, dt_bias, initial = inputs
    parameters = (a_log, dt_bias) if options.gate else (None, None)
    out, final = fused.ChunkKda.apply(q, k, v, g, beta, *parameters, initial, True, True, options)
    return out, final


def choose(bounds: tuple[int, ...], bound: float = -5.0, **flags: bool) -> Options:
    modes = {"norm": True, "gate": True, "sigmoid": True} | flags
    return Options(bounds, WIDTH**-0.5, bound, **modes)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().double().cpu() - b.detach()).norm() / b.detach().norm())


@pytest.mark.parametrize(
    ("bounds", "bound", "flags", "shift"),
    [
        ((0, 70), -5.0, {}, 0.0),
        ((0, 33, 33, 34, 66), -5.0, {}, 0.0),
        ((0, 40), -5.8, {}, 6.0),  # chunks of 16
        ((0, 64), -5.0, {}, -30.0),  # no decay
        ((0, 40), -5.0, {"gate": False}, 0.0),
        ((0, 40), -5.0, {"norm": False, "sigmoid": False}, 0.0),
        ((0, 1), -5.0, {}, 0.0),
    ],
)
def test_outputs_states_and_gradients_are_those_of_the_recurrence(
    bounds: tuple[int, ...], bound: float, flags: dict[str, bool], shift: float
) -> None:
    options = choose(bounds, bound, **flags)
    inputs = draw(bounds[-1], len(bounds) - 1, shift=shift)
    if not options.gate:
        inputs[3] = -5 * torch.rand_like(inputs[3])
    if not options.norm:
        inputs[0], inputs[1] = (torch.nn.functional.normalize(x, dim=-1) for x in inputs[:2])
    if not options.sigmoid:
        inputs[4] = inputs[4].sigmoid()
        inputs[4][::3] = 0.0
    wide = [x.clone().requires_grad_() for x in inputs]
    narrow = [x.float().to(DEVICE).requires_grad_() for x in inputs]
    q, k, v, g, beta, a_log, dt_bias, initial = wide
    out, final = naive_kda(
        q[None],
        k[None],
        v[None],
        g[None],
        beta[None],
        A_log=a_log,
        dt_bias=dt_bias,
        initial_state=initial,
        output_final_state=True,
        use_qk_l2norm_in_kernel=options.norm,
        use_gate_in_kernel=options.gate,
        use_beta_sigmoid_in_kernel=options.sigmoid,
        lower_bound=bound,
        cu_seqlens=torch.tensor(bounds),
    )
    assert final is not None
    d_out, d_final = torch.randn_like(out[0]), torch.randn_like(final)
    torch.autograd.backward([out[0], final], [d_out, d_final])
    found, found_final = run(narrow, options)
    torch.autograd.backward([found, found_final], [x.float().to(DEVICE) for x in (d_out, d_final)])
    assert relative(found, out[0]) < 1e-5
    assert relative(found_final, final) < 1e-5
    assert g.grad is not None
    # A sum over tokens of terms that may cancel: its error is relative to the terms.
    terms = (g.grad * (g + dt_bias.view(-1, WIDTH)).detach()).norm()
    for name, a, b in zip(NAMES, narrow, wide, strict=True):
        if b.grad is not None and float(b.grad.norm()) > 1e-12:
            assert a.grad is not None
            size = max(b.grad.norm(), terms) if name == "A_log" else b.grad.norm()
            error = float((a.grad.double().cpu() - b.grad).norm() / size)
            assert error < 2e-4, name


def test_long_sequences_of_few_heads_are_cut_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, states and gradients as without cuts, and the same bits alone and in a pack."""
    bounds = (0, 40, 40, 250, 253)
    inputs = [x.float().to(DEVICE) for x in draw(253, 4, shift=-4.0)]
    d_out, d_final = torch.randn(253, 2, WIDTH), torch.randn(4, 2, WIDTH, WIDTH)

    def results(xs: list[torch.Tensor], limits: tuple[int, ...], rows: slice) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in xs]
        out, final = run(leaves, choose(limits))
        wanted = [d_out[rows].to(DEVICE), d_final[2:3].to(DEVICE)]
        if len(limits) > 2:
            wanted[1] = d_final.to(DEVICE)
        grads = torch.autograd.grad([out, final], leaves, wanted)
        return [out.detach(), final.detach(), *grads]

    whole = results(inputs, bounds, slice(None))
    monkeypatch.setattr(segments, "SPLIT_TOKENS", 64)
    cut = results(inputs, bounds, slice(None))
    for a, b in zip(cut, whole, strict=True):
        assert relative(a, b.double().cpu()) < 1e-5
    tokens = slice(40, 250)
    only = [x[tokens] for x in inputs[:5]] + inputs[5:7] + [inputs[7][2:3]]
    alone = results(only, (0, 210), tokens)
    for index in (0, *range(2, 7)):
        assert torch.equal(alone[index], cut[index][tokens])
    assert torch.equal(alone[1], cut[1][2:3]) and torch.equal(alone[9], cut[9][2:3])
    first = [x[40:140] for x in inputs[:5]] + inputs[5:7] + [inputs[7][2:3]]
    prefix, _ = run(first, choose((0, 100)))
    assert torch.equal(prefix, cut[0][40:140])  # what follows moves no cut
    for final in (True, False):  # without gradients, less is computed
        out, last = fused.ChunkKda.apply(*inputs, final, False, choose(bounds))
        assert torch.equal(out, cut[0])
        assert torch.equal(last, cut[1]) if final else last is None


def test_pieces_fall_as_wanted_and_none_is_too_short() -> None:
    """Shares 1 / (1 + f + f^2 ...) of the chunks, of as many pieces as their lengths allow."""
    assert tables.piece_edges((0, 8960), 32, 0.5, 8) == [0, 160, 240, 280]  # 4/7, 2/7, 1/7
    assert tables.piece_edges((0, 8959), 32, 0.5, 8) == [0, 187, 280]  # a third has less than 1280
    assert tables.piece_edges((5, 6149), 32, 1.0, 8) == [0, 96, 192]
    assert tables.piece_edges((0, 6143), 32, 1.0, 8) == [
        0,
        192,
    ]  # halves have less than 3072 tokens
    assert tables.piece_edges((0, 2**20), 32, 1.0, 8) == [4096 * part for part in range(9)]
    assert tables.piece_edges((0, 2**20), 32, 1.0, 2) == [0, 16384, 32768]
    found = tables.pieces((7, 8998), 32, 0.5, 8, torch.device("cpu"))
    rows = [piece.sequences.tolist() for piece in found]
    assert rows == [[[0, 0, 7, 5152]], [[0, 161, 5159, 2560]], [[0, 241, 7719, 1279]]]
    assert [piece.chunks for piece in found] == [range(161), range(161, 241), range(241, 281)]


def test_states_at_cuts_are_sums_in_the_order_of_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, in fp64, whatever the tiles; stretches of sequences without cuts have no map."""
    monkeypatch.setattr(segments, "SPLIT_TOKENS", 64)
    monkeypatch.setattr(segments, "WALK_ROWS", 4)
    cut = segments.segments((0, 40, 240, 240, 370), 2, 32, torch.device(DEVICE))
    assert cut is not None
    whole, lines = (0, 5), ((1, 2, 3, 4), (6, 7, 8))
    maps, driven = torch.randn(9, 2, WIDTH, WIDTH), torch.randn(9, 2, WIDTH, 2 * WIDTH)
    maps[whole, :], driven[whole, :] = torch.nan, torch.nan
    given = torch.randn(4, 2, WIDTH, 2 * WIDTH)

    def move(step: torch.Tensor, state: torch.Tensor, number: int) -> torch.Tensor:
        total = driven[number].double()
        for k in range(WIDTH):
            total = total + step[:, :, k, None].double() * state[:, k, None].double()
        return total.float()

    entering, leaving = torch.zeros_like(driven), torch.zeros_like(driven)
    entering[[0, 1, 5, 6]], leaving[[0, 4, 5, 8]] = given, given
    for line in lines:
        for a, b in itertools.pairwise(line):
            entering[b] = move(maps[a], entering[a], a)
        for b, a in itertools.pairwise(line[::-1]):
            leaving[a] = move(maps[b].mT, leaving[b], b)
    turned, other, edges = (x.to(DEVICE) for x in (maps.mT.contiguous(), driven, given))
    assert torch.equal(cut.entering(turned, other, edges).cpu(), entering)
    assert torch.equal(cut.leaving(turned, other, edges).cpu(), leaving)


def test_constant_decay_at_the_bound_has_an_exact_gradient() -> None:
    """All log decays -5: what cancels between neighbours must cancel exactly."""
    inputs = draw(64, 1)
    inputs[3] = torch.full_like(inputs[3], -5.0)
    options = choose((0, 64), gate=False)
    wide = [x.clone().requires_grad_() for x in inputs]
    narrow = [x.float().to(DEVICE).requires_grad_() for x in inputs]
    out, _ = naive_kda(
        *(x[None] for x in wide[:5]),
        initial_state=wide[7],
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    )
    d_out = torch.randn_like(out[0])
    out[0].backward(d_out)
    run(narrow, options)[0].backward(d_out.float().to(DEVICE))
    assert wide[3].grad is not None and narrow[3].grad is not None
    assert relative(narrow[3].grad, wide[3].grad) < 1e-4


def test_what_follows_changes_no_bit_of_what_came_before() -> None:
    inputs = [x.float().to(DEVICE) for x in draw(75, 1)]
    changed = [x.clone() for x in inputs]
    for x in changed[:5]:
        x[41:] = torch.randn_like(x[41:])
    whole, short, other = (
        [x.clone().requires_grad_() for x in xs]
        for xs in (inputs, [x[:41] if len(x) == 75 else x for x in inputs], changed)
    )
    outs = []
    for xs, tokens in ((whole, 75), (short, 41), (other, 75)):
        out, _ = run(xs, choose((0, tokens)))
        out[:41].square().sum().backward()
        outs.append(out[:41])
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    for name, a, b, c in zip(NAMES[:5], whole, short, other, strict=False):
        assert a.grad is not None and b.grad is not None and c.grad is not None
        assert torch.equal(a.grad[:41], b.grad[:41]), name
        assert torch.equal(a.grad[:41], c.grad[:41]), name


def test_a_neighbour_full_of_nan_does_not_leak() -> None:
    inputs = [x.float().to(DEVICE) for x in draw(80, 3)]
    bounds = (0, 30, 45, 80)
    alone = [x[45:] if len(x) == 80 else x for x in inputs]
    alone[7] = inputs[7][2:]
    poisoned = [x.clone() for x in inputs]
    for x in poisoned[:5]:
        x[30:45] = float("nan")
    poisoned[7][1] = float("nan")
    a = [x.requires_grad_() for x in poisoned]
    b = [x.clone().requires_grad_() for x in alone]
    out, final = run(a, choose(bounds))
    expected, expected_final = run(b, choose((0, 35)))
    assert torch.equal(out[45:], expected)
    assert torch.equal(final[2], expected_final[0])
    out[45:].sum().backward()
    expected.sum().backward()
    for name, x, y in zip(NAMES[:5], a, b, strict=False):
        assert x.grad is not None and y.grad is not None
        assert torch.equal(x.grad[45:], y.grad), name


def test_equal_keys_with_full_strength_stay_accurate() -> None:
    inputs = draw(96, 1, shift=-30.0)
    inputs[1] = inputs[1][:1].expand_as(inputs[1]).clone()
    inputs[4] = inputs[4] + 8.0
    out, _ = run([x.float().to(DEVICE) for x in inputs], choose((0, 96)))
    expected, _ = naive_kda(
        *(x[None] for x in inputs[:5]),
        A_log=inputs[5],
        dt_bias=inputs[6],
        initial_state=inputs[7],
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    )
    assert relative(out, expected[0]) < 1e-4


def test_a_decay_beyond_the_bound_is_seen() -> None:
    inputs = [x.float().to(DEVICE) for x in draw(8, 1)]
    inputs[3] = torch.full_like(inputs[3], -1.0)
    inputs[3][5, 0, 0] = -5.5
    out, _ = run(inputs, choose((0, 8), gate=False))
    assert bool(out[5:, 0].isnan().all()) and not bool(out[:, 1].isnan().any())


def test_strided_inputs_are_read_where_they_are() -> None:
    inputs = [x.float().to(DEVICE) for x in draw(20, 1)]
    packed = torch.stack(inputs[:3], 1)  # [T, 3, H, K]
    strided = [*packed.unbind(1), *inputs[3:]]
    assert not strided[0].is_contiguous()
    assert torch.equal(run(strided, choose((0, 20)))[0], run(inputs, choose((0, 20)))[0])


def test_a_head_size_the_kernels_do_not_take_is_named() -> None:
    x = torch.zeros(4, 1, 48)
    with pytest.raises(
        ValueError, match="q has head size 48; on GPU it must be one of 16, 32, 64, 128"
    ):
        fused.chunk_kda_fused(
            x, x, x, x, x[..., 0], None, None, None, False, choose((0, 4), gate=False)
        )


@pytest.mark.parametrize("shift", [-4.0, -30.0])
def test_small_gradients_keep_their_precision(shift: float) -> None:
    """Products that carry 2^+-anchor must not fall out of the range of fp32."""
    inputs = [x.float().to(DEVICE) for x in draw(40, 1, shift=shift)]
    d_out = torch.randn(40, 2, WIDTH, device=DEVICE)
    grads = []
    for size in (1.0, 2.0**-40):
        leaves = [x.clone().requires_grad_() for x in inputs]
        run(leaves, choose((0, 40)))[0].backward(d_out * size)
        grads.append([x.grad / size for x in leaves if x.grad is not None])
    for name, a, b in zip(NAMES, *grads, strict=True):
        assert relative(b, a.double().cpu()) < 1e-5, name


def test_large_values_have_finite_gradients() -> None:
    inputs = draw(40, 1, shift=-30.0)
    inputs[2] = inputs[2] * 1e4
    wide = [x.clone().requires_grad_() for x in inputs]
    narrow = [x.float().to(DEVICE).requires_grad_() for x in inputs]
    out, _ = naive_kda(
        *(x[None] for x in wide[:5]),
        A_log=wide[5],
        dt_bias=wide[6],
        initial_state=wide[7],
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    )
    d_out = torch.randn_like(out[0])
    out[0].backward(d_out)
    run(narrow, choose((0, 40)))[0].backward(d_out.float().to(DEVICE))
    for name, a, b in zip(NAMES[:5], narrow, wide, strict=False):
        assert a.grad is not None and b.grad is not None
        assert relative(a.grad, b.grad) < 1e-4, name


def test_empty_sequences_at_both_ends() -> None:
    inputs = [x.float().to(DEVICE) for x in draw(40, 3)]
    leaves = [x.clone().requires_grad_() for x in inputs]
    out, final = run(leaves, choose((0, 0, 40, 40)))
    (out.sum() + final.sum()).backward()
    alone = [*inputs[:7], inputs[7][1:2]]
    expected, expected_final = run(alone, choose((0, 40)))
    assert torch.equal(out, expected) and torch.equal(final[1], expected_final[0])
    assert torch.equal(final[0], inputs[7][0]) and torch.equal(final[2], inputs[7][2])
    assert leaves[7].grad is not None
    assert torch.equal(leaves[7].grad[0], torch.ones_like(leaves[7][0]))


def test_expanded_gradients_and_strided_parameters() -> None:
    inputs = [x.float().to(DEVICE) for x in draw(20, 1)]
    rates = torch.stack([inputs[5], inputs[5] + 1], 1)  # A_log with a stride
    grads: list[torch.Tensor | None] = []
    outs: list[torch.Tensor] = []
    for a_log in (rates[:, 0], inputs[5]):
        leaves = [x.clone().requires_grad_() for x in inputs]
        q, k, v, g, beta, _, dt_bias, initial = leaves
        out, _ = fused.chunk_kda_fused(
            q, k, v, g, beta, a_log, dt_bias, initial, False, choose((0, 20))
        )
        weight = torch.ones(20, 2, 1, device=DEVICE)
        out.backward((weight if len(grads) else weight.clone()).expand_as(out))
        grads.append(q.grad)
        outs.append(out)
    assert grads[0] is not None and grads[1] is not None
    assert torch.equal(outs[0], outs[1]) and torch.equal(grads[0], grads[1])


def whole(inputs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The function that `chunk_kda` calls, on 20 tokens."""
    q, k, v, g, beta, a_log, dt_bias, initial = inputs
    return fused.chunk_kda_fused(q, k, v, g, beta, a_log, dt_bias, initial, False, choose((0, 20)))


def test_without_gradients_nothing_is_kept() -> None:
    inputs = [x.float().to(DEVICE).requires_grad_() for x in draw(20, 1)]
    with torch.no_grad():
        out, _ = whole(inputs)
    assert out.grad_fn is None


def test_a_second_derivative_is_refused() -> None:
    inputs = [x.float().to(DEVICE).requires_grad_() for x in draw(20, 1)]
    out, _ = whole(inputs)
    (grad,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
