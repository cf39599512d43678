"""The decode step of a KDA layer: its kernel in Triton's interpreter where there is no GPU, else
compiled, and the three functions that it stands for."""

from __future__ import annotations

import os

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are decorated, below
import triton.experimental.gluon  # noqa: E402, F401  # in the same mode: launches look into it

from farhorizon.kernels.conv import naive_short_conv  # noqa: E402
from farhorizon.kernels.kda import decode, decode_kda, decode_kda_, naive_kda  # noqa: E402
from farhorizon.kernels.norm import naive_gated_norm  # noqa: E402

os.environ.pop("TRITON_INTERPRET", None)

DEVICE = "cuda" if GPU else "cpu"
HEADS, EPS = 3, 1e-5
ROWS = ("qkv", "tail", "z", "beta", "gate", "state")
WIDE = ("kernel", "weight", "A_log", "dt_bias", "state")
Inputs = dict[str, torch.Tensor]
Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def draw(count: int, width: int = 16, values: int = 16, *, taps: int = 4) -> Inputs:
    """fp64, rounded to what bf16 holds: the same numbers in every type."""
    channels = HEADS * (2 * width + values)
    found = {
        "qkv": torch.randn(count, channels),
        "kernel": torch.randn(channels, taps) / 2,
        "tail": torch.randn(count, taps - 1, channels),
        "z": torch.randn(count, HEADS * width),
        "beta": torch.randn(count, HEADS),
        "gate": torch.randn(count, HEADS * values),
        "weight": 1 + torch.randn(values) / 4,
        "A_log": torch.randn(HEADS) * 0.3,
        "dt_bias": torch.randn(HEADS * width),
        "state": torch.randn(count, HEADS, width, values) * 0.3,
    }
    return {name: x.bfloat16().double().to(DEVICE) for name, x in found.items()}


def narrowed(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    return {name: x.float() if name in WIDE else x.to(dtype) for name, x in inputs.items()}


def run(inputs: Inputs, bound: float = -5.0) -> Result:
    rows = tuple(inputs[name] for name in ("qkv", "z", "beta", "gate", "tail"))
    parameters = tuple(inputs[name] for name in ("kernel", "weight", "A_log", "dt_bias"))
    return decode.decode_step(rows, parameters, inputs["state"], bound=bound, eps=EPS)  # type: ignore[arg-type]


def public(inputs: Inputs, bound: float | None = -5.0) -> Result:
    given = {"initial_state" if name == "state" else name: x for name, x in inputs.items()}
    return decode_kda(**given, eps=EPS, lower_bound=bound)  # type: ignore[arg-type]


def by_parts(inputs: Inputs, dtype: torch.dtype, bound: float | None = -5.0) -> Result:
    """By definition in fp64, rounded to ``dtype`` behind the convolution and the recurrence."""
    wide = {name: x.double() for name, x in inputs.items()}
    count, heads, width, values = inputs["state"].shape
    mixed, tail = naive_short_conv(
        wide["qkv"], wide["kernel"], tuple(range(count + 1)), wide["tail"]
    )
    q, k, v = mixed.to(dtype).double().split([heads * n for n in (width, width, values)], 1)
    out, state = naive_kda(
        q.view(count, 1, heads, width),
        k.view(count, 1, heads, width),
        v.view(count, 1, heads, values),
        wide["z"].view(count, 1, heads, width),
        wide["beta"].view(count, 1, heads),
        A_log=wide["A_log"],
        dt_bias=wide["dt_bias"],
        initial_state=wide["state"],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=bound,
    )
    assert state is not None
    out = out.to(dtype).double().view(count, heads, values)
    normed = naive_gated_norm(out, wide["gate"].view(out.shape), wide["weight"], EPS)
    return normed.flatten(1), state, tail


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize(
    ("width", "values"),
    [(16, 16), (32, 32), (64, 64), (128, 128), (16, 128), (128, 32)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_is_its_three_parts(width: int, values: int, dtype: torch.dtype) -> None:
    """With every rounding where the parts have it, and with no other: then the fp32 state differs
    by fp32 sums, and few outputs by one rounding. The interpreter cuts bf16, where a GPU rounds."""
    inputs = draw(3, width, values)
    out, state, tail = run(narrowed(inputs, dtype))
    expected, last, _ = by_parts(inputs, dtype)
    assert out.dtype == tail.dtype == dtype and state.dtype == torch.float32
    cut = dtype == torch.bfloat16 and not GPU
    near = {torch.float32: 1e-6, torch.float16: 5e-5, torch.bfloat16: 4e-4}[dtype]
    assert relative(state, last) < (6e-3 if cut else near)
    assert relative(out, expected) < (8e-3 if cut else 2e-6 if dtype == torch.float32 else 2.5e-3)
    if dtype == torch.float16:
        assert float((out != expected.half()).double().mean()) < 0.02
    whole = torch.cat([inputs["tail"], inputs["qkv"][:, None]], 1)
    assert torch.equal(tail.double(), whole[:, 1:])


@pytest.mark.parametrize("taps", [1, 2, 3, 5])
def test_five_tokens_of_any_kernel_width(taps: int) -> None:
    given = draw(3, taps=taps)
    found = narrowed(given, torch.float32)
    for _ in range(5):
        now = draw(3, taps=taps)
        given |= {name: now[name] for name in ("qkv", "z", "beta", "gate")}
        found |= {name: now[name].float() for name in ("qkv", "z", "beta", "gate")}
        expected, given["state"], given["tail"] = by_parts(given, torch.float64)
        out, found["state"], found["tail"] = run(found)
        assert relative(out, expected) < 2e-6
    assert relative(found["state"], given["state"]) < 1e-6
    assert torch.equal(found["tail"].double(), given["tail"])


@pytest.mark.parametrize(("bound", "shift"), [(-5.8, 0.0), (-5.0, 50.0), (-5.0, -50.0)])
def test_decays_at_the_bound_and_none(bound: float, shift: float) -> None:
    inputs = draw(2)
    inputs["z"] += shift
    for a, b in zip(
        run(narrowed(inputs, torch.float32), bound),
        by_parts(inputs, torch.float32, bound),
        strict=True,
    ):
        assert relative(a, b) < 2e-6


@pytest.mark.parametrize(("columns", "held"), [(16, 1), (16, 8), (64, 9), (128, 1)])
def test_blocks_of_the_state_do_not_show(
    columns: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = narrowed(draw(2, 32, 128), torch.float32)
    expected = run(inputs)
    monkeypatch.setattr(decode, "COLUMNS", columns)
    monkeypatch.setattr(decode, "HELD", held)
    for a, b in zip(run(inputs), expected, strict=True):
        assert relative(a, b) < 1e-6


def test_what_is_given_is_not_written() -> None:
    inputs = narrowed(draw(3), torch.float32)
    kept = {name: x.clone() for name, x in inputs.items()}
    run(inputs)
    assert all(torch.equal(x, kept[name]) for name, x in inputs.items())


def test_siblings_of_one_state_go_their_own_ways() -> None:
    inputs = narrowed(draw(3), torch.float32)
    shared = {name: inputs[name][:1].expand(3, *inputs[name].shape[1:]) for name in ROWS[1:]}
    found = run(inputs | shared)
    apart = run(inputs | {name: x.clone() for name, x in shared.items()})
    for a, b in zip(found, apart, strict=True):
        assert torch.equal(a, b) and not torch.equal(a[0], a[1])


def test_a_sequence_has_the_same_bits_alone() -> None:
    inputs = narrowed(draw(3, 32, 64), torch.bfloat16)
    found = run(inputs)
    for n in range(3):
        own = run({k: x[n : n + 1].clone() if k in ROWS else x for k, x in inputs.items()})
        for a, b in zip(found, own, strict=True):
            assert torch.equal(a[n : n + 1], b)


def test_strided_inputs_are_read_where_they_are() -> None:
    """Rows that are parts of wider ones, for each of them another stride, and a channel stride."""
    inputs = narrowed(draw(3), torch.float32)
    expected = run(inputs)
    strided: Inputs = {}
    for extra, name in enumerate(("qkv", "z", "beta", "gate", "tail"), 1):
        x = inputs[name]
        wider = x.new_full((*x.shape[:-1], x.shape[-1] + extra), float("nan"))
        wider[..., extra:] = x
        strided[name] = wider[..., extra:]
    strided["state"] = inputs["state"].transpose(2, 3).contiguous().transpose(2, 3)
    strided["kernel"] = inputs["kernel"].t().contiguous().t()
    assert not any(x.is_contiguous() for x in strided.values())
    twice = inputs["gate"].repeat_interleave(2, 1)[:, ::2]
    for changes in (strided, {"gate": twice}):
        for a, b in zip(run(inputs | changes), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", ROWS)
def test_nan_stays_in_its_head(name: str) -> None:
    inputs = narrowed(draw(3), torch.float32)
    expected = run(inputs)
    inputs[name] = inputs[name].clone()
    # sequence 1, head 0: q's first head leads a row of channels
    index = {"state": (1, 0), "tail": (1, slice(1, None), 0), "beta": (1, 0)}
    inputs[name][index.get(name, (1, slice(0, 2)))] = float("nan")
    found = run(inputs)
    clean = torch.ones(3, HEADS, dtype=torch.bool, device=DEVICE)
    clean[1, 0] = False
    heads = [x.view(3, HEADS, -1) for x in (found[0], expected[0])]
    assert bool(heads[0][1, 0].isnan().any())
    assert torch.equal(heads[0][clean], heads[1][clean])
    assert torch.equal(found[1][clean], expected[1][clean])
    kept = torch.cat([inputs["tail"], inputs["qkv"][:, None]], 1)[:, 1:]
    assert torch.equal(found[2].nan_to_num(7), kept.nan_to_num(7))


def test_what_the_kernel_takes() -> None:
    def takes(changes: Inputs | None = None, given: Inputs | None = None) -> bool:
        found = (given or narrowed(draw(2), torch.bfloat16)) | (changes or {})
        state = found.pop("state")
        return decode.takes_decode(tuple(found.values()), state)

    assert takes() and takes(given=narrowed(draw(2, 128, 128), torch.float32))
    assert not takes(given=narrowed(draw(2, 24, 16), torch.bfloat16))
    assert not takes(given=narrowed(draw(2, 16, 24), torch.bfloat16))
    assert not takes(given=narrowed(draw(2), torch.float64))
    assert not takes({"state": draw(2)["state"]})
    assert not takes({"state": draw(2)["state"].bfloat16()})
    weight = draw(2)["weight"].float().requires_grad_()
    assert not takes({"weight": weight})
    with torch.inference_mode():
        assert takes({"weight": weight})


@pytest.mark.parametrize("bound", [-5.0, None])
def test_without_the_kernel_it_is_the_three_functions(bound: float | None) -> None:
    """In fp64, with every gradient, at a head size that the kernel does not take."""
    inputs = {name: x.requires_grad_() for name, x in draw(3, 12, 20).items()}
    found, expected = public(inputs, bound), by_parts(inputs, torch.float64, bound)
    leaves = list(inputs.values())
    weights = [torch.randn_like(x) for x in expected]
    grads = [torch.autograd.grad(results, leaves, weights) for results in (found, expected)]
    for a, b in zip((*found, *grads[0]), (*expected, *grads[1]), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", [*ROWS[:-1], "kernel", "weight", "A_log", "dt_bias"])
def test_a_shape_that_does_not_fit_is_named(name: str) -> None:
    inputs = narrowed(draw(2), torch.float32)
    inputs[name] = inputs[name][..., :-1]
    with pytest.raises(ValueError, match=rf"^({name}|qkv|tail) has shape .*, expected"):
        public(inputs)


def test_a_bound_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="lower_bound must lie in"):
        public(draw(2), -6.0)


@pytest.mark.parametrize("kernel", [True, False])
def test_in_place_it_changes_the_rows_that_are_named_and_no_other(kernel: bool) -> None:
    """Of six rows three, in another order; one of four sequences has none. Places lie apart."""
    inputs = narrowed(draw(4), torch.float32)
    kept, tails = torch.randn(6, HEADS, 16, 16).to(DEVICE), torch.randn(6, 3, HEADS * 48).to(DEVICE)
    pairs = [[4, 5], [-1, 5], [0, 5], [2, 5]]
    places = torch.tensor(pairs, dtype=torch.int32, device=DEVICE)[:, 0]
    used, where = [0, 2, 3], [4, 0, 2]
    some = {
        n: x if n in ("kernel", "weight", "A_log", "dt_bias") else x[used]
        for n, x in inputs.items()
    }
    some |= {"state": kept[where], "tail": tails[where]}
    out, state, tail = run(some) if kernel else public(some)
    state_now, tail_now = kept.clone(), tails.clone()
    if kernel:
        qkv, z, beta, gate = (inputs[name] for name in ("qkv", "z", "beta", "gate"))
        kernels, weight, a_log, bias = (
            inputs[name] for name in ("kernel", "weight", "A_log", "dt_bias")
        )
        found = decode.decode_step(
            (qkv, z, beta, gate, tail_now),
            (kernels, weight, a_log, bias),
            state_now,
            bound=-5.0,
            eps=EPS,
            places=places,
        )[0]
    else:
        given = inputs | {"state": state_now, "tail": tail_now}
        found = decode_kda_(**given, eps=EPS, places=places)  # type: ignore[arg-type]
    assert torch.equal(found[used], out) and not found[1].any()
    kept[where], tails[where] = state, tail
    assert torch.equal(state_now, kept) and torch.equal(tail_now, tails)


def test_in_place_without_any_sequence_nothing_changes() -> None:
    inputs = narrowed(draw(2), torch.float32)
    before = inputs["state"].clone()
    places = torch.full((2,), -1, dtype=torch.int32, device=DEVICE)
    decode_kda_(**inputs, eps=EPS, places=places)  # type: ignore[arg-type]
    assert torch.equal(inputs["state"], before)
