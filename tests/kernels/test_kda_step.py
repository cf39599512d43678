"""The decode kernel of KDA: in Triton's interpreter where there is no GPU, else compiled."""

from __future__ import annotations

import os

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are decorated, below
import triton.experimental.gluon  # noqa: E402, F401  # in the same mode: launches look into it

from farhorizon.kernels.kda import naive_kda, step  # noqa: E402

os.environ.pop("TRITON_INTERPRET", None)

DEVICE = "cuda" if GPU else "cpu"
HEADS = 2
Inputs = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def draw(
    count: int, width: int = 16, values: int = 16, *, tokens: int = 1, shift: float = 0.0
) -> Inputs:
    """fp64, rounded to what bf16 holds: the same numbers in every type."""
    found = {name: torch.randn(count, tokens, HEADS, width) for name in ("q", "k", "g")}
    found["v"] = torch.randn(count, tokens, HEADS, values)
    found["beta"] = torch.randn(count, tokens, HEADS)
    found["g"] = found["g"] + shift
    found["A_log"], found["dt_bias"] = torch.randn(HEADS) * 0.3, torch.randn(HEADS * width)
    found["state"] = torch.randn(count, HEADS, width, values) * 0.3
    return {name: x.bfloat16().double().to(DEVICE) for name, x in found.items()}


def narrowed(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    wide = ("A_log", "dt_bias", "state")
    return {name: x.float() if name in wide else x.to(dtype) for name, x in inputs.items()}


def run(
    inputs: Inputs,
    *,
    gate: bool = True,
    norm: bool = True,
    sigmoid: bool = True,
    final: bool = True,
    bound: float = -5.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    q, k, v, g, beta = (inputs[name] for name in ("q", "k", "v", "g", "beta"))
    return step.recurrent_step(
        (q, k, v, g, beta),
        (inputs["A_log"], inputs["dt_bias"]) if gate else (None, None),
        inputs["state"],
        final=final,
        scale=q.shape[3] ** -0.5,
        bound=bound,
        norm=norm,
        sigmoid=sigmoid,
    )


def alone(inputs: Inputs, rows: slice) -> Inputs:
    """Some of the sequences, in memory of their own."""
    shared = ("A_log", "dt_bias")
    return {name: x if name in shared else x[rows].clone() for name, x in inputs.items()}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b).norm() / b.norm())


def walk_both(
    inputs: Inputs, dtype: torch.dtype, *, gate: bool, norm: bool, sigmoid: bool, bound: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and last state, token by token in the kernel, and by definition in fp64."""
    out, last = naive_kda(
        *(inputs[name] for name in ("q", "k", "v", "g", "beta")),
        A_log=inputs["A_log"],
        dt_bias=inputs["dt_bias"],
        initial_state=inputs["state"],
        output_final_state=True,
        use_qk_l2norm_in_kernel=norm,
        use_gate_in_kernel=gate,
        use_beta_sigmoid_in_kernel=sigmoid,
        lower_bound=bound,
    )
    assert last is not None
    given, found = narrowed(inputs, dtype), []
    state = given["state"]
    for t in range(out.shape[1]):
        now = {name: given[name][:, t : t + 1] for name in ("q", "k", "v", "g", "beta")}
        options = {"gate": gate, "norm": norm, "sigmoid": sigmoid}
        o, after = run(given | now | {"state": state}, bound=bound, **options)
        assert after is not None and o.dtype == dtype
        found.append(o)
        state = after
    return [torch.cat(found, 1), state], [out, last]


@pytest.mark.parametrize(
    ("width", "values"), [(16, 16), (32, 16), (16, 128), (64, 64), (128, 32), (128, 128)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_five_tokens_follow_the_recurrence(width: int, values: int, dtype: torch.dtype) -> None:
    inputs = draw(3, width, values, tokens=5)
    found, expected = walk_both(inputs, dtype, gate=True, norm=True, sigmoid=True, bound=-5.0)
    assert relative(found[0], expected[0]) < (1e-6 if dtype == torch.float32 else 4e-3)
    assert relative(found[1], expected[1]) < 1e-6  # the state stays in fp32


@pytest.mark.parametrize(
    ("gate", "norm", "sigmoid", "bound", "shift"),
    [
        (True, True, True, -5.8, 0.0),
        (True, True, True, -5.0, 50.0),  # every decay at the bound
        (True, True, True, -5.0, -50.0),  # none
        (False, True, True, -5.0, 0.0),
        (True, False, True, -5.0, 0.0),
        (True, True, False, -5.0, 0.0),
    ],
)
def test_every_mode_follows_the_recurrence(
    gate: bool, norm: bool, sigmoid: bool, bound: float, shift: float
) -> None:
    inputs = draw(2, tokens=5, shift=shift)
    if not gate:
        inputs["g"] = -80 * torch.rand_like(inputs["g"]).bfloat16().double()
        inputs["g"][:, ::2] = -0.125
    if not norm:
        inputs["k"] = inputs["k"] / 4
    if not sigmoid:
        inputs["beta"] = torch.tensor([0.0, 1.0, 0.5, 1.0, 0.25])[:, None].to(inputs["beta"])
        inputs["beta"] = inputs["beta"].expand(2, 5, HEADS)
    options = {"gate": gate, "norm": norm, "sigmoid": sigmoid}
    found, expected = walk_both(inputs, torch.float32, bound=bound, **options)
    assert relative(found[0], expected[0]) < 1e-6
    assert relative(found[1], expected[1]) < 1e-6


def test_a_token_by_hand() -> None:
    """Two channels in use, decays 1/2 and 1; the rest of the head stays zero.

    S = [[2], [4]] -> [[1], [4]]; k = (1, 1) reads 5; with v = 7 and beta = 1/2 the error is 1, so
    that S = [[2], [5]], and q = (3, 1) reads 11.
    """
    inputs = {name: torch.zeros(1, 1, 1, 16, device=DEVICE) for name in ("q", "k", "v", "g")}
    inputs["state"] = torch.zeros(1, 1, 16, 16, device=DEVICE)
    inputs["beta"] = torch.full((1, 1, 1), 0.5, device=DEVICE)
    inputs["q"][..., 0], inputs["q"][..., 1] = 3 * 16**0.5, 16**0.5
    inputs["k"][..., :2] = 1.0
    inputs["v"][..., 2] = 7.0
    inputs["g"][..., 0] = torch.tensor(0.5).log()
    inputs["state"][0, 0, 0, 2], inputs["state"][0, 0, 1, 2] = 2.0, 4.0
    inputs["A_log"] = inputs["dt_bias"] = torch.zeros(0)
    out, last = run(inputs, gate=False, norm=False, sigmoid=False)
    assert last is not None
    torch.testing.assert_close(out[0, 0, 0, 2].item(), 11.0)
    torch.testing.assert_close(last[0, 0, :3, 2].cpu(), torch.tensor([2.0, 5.0, 0.0]))
    assert not out[..., :2].any() and not last[..., 3:].any()


def test_no_sequences_give_nothing() -> None:
    out, last = run(narrowed(draw(0), torch.bfloat16))
    assert last is not None
    assert out.shape == (0, 1, HEADS, 16) and last.shape == (0, HEADS, 16, 16)


def test_the_given_state_is_not_written_and_shared_with_none() -> None:
    """Siblings forked as views of one state go their own ways."""
    inputs = narrowed(draw(3), torch.float32)
    kept = inputs["state"].clone()
    run(inputs)
    assert torch.equal(inputs["state"], kept)
    parent = inputs["state"][:1].clone()
    before = parent.clone()
    out, last = run(inputs | {"state": parent.expand(3, -1, -1, -1)})
    assert last is not None and torch.equal(parent, before)
    assert len({x.data_ptr() for x in (parent, *last)}) == 4
    for n in range(3):
        part = alone(inputs, slice(n, n + 1)) | {"state": before.clone()}
        own_out, own_last = run(part)
        assert own_last is not None
        assert torch.equal(out[n : n + 1], own_out) and torch.equal(last[n : n + 1], own_last)


def test_a_sequence_has_the_same_bits_wherever_it_stands() -> None:
    inputs = narrowed(draw(3, 32, 64), torch.float32)
    out, last = run(inputs)
    order = torch.tensor([2, 0, 1], device=DEVICE)
    turned = {k: x if k in ("A_log", "dt_bias") else x[order] for k, x in inputs.items()}
    other_out, other_last = run(turned)
    assert last is not None and other_last is not None
    assert torch.equal(out[order], other_out) and torch.equal(last[order], other_last)
    for n in range(3):
        own_out, own_last = run(alone(inputs, slice(n, n + 1)))
        assert own_last is not None
        assert torch.equal(out[n : n + 1], own_out) and torch.equal(last[n : n + 1], own_last)


def test_outputs_need_no_final_state() -> None:
    inputs = narrowed(draw(2), torch.float32)
    out, last = run(inputs, final=False)
    assert last is None and torch.equal(out, run(inputs)[0])


def test_strided_inputs_are_read_where_they_are() -> None:
    inputs = narrowed(draw(3), torch.float32)
    expected = run(inputs)
    packed = torch.stack([inputs[name] for name in ("q", "k", "v")], 2)
    q, k, v = packed.unbind(2)
    wide = torch.zeros(3, 1, HEADS, 3, device=DEVICE)
    wide[..., 1] = inputs["beta"]
    apart = torch.zeros(3, 1, HEADS, 32, device=DEVICE)
    apart[..., ::2] = inputs["g"]
    state = inputs["state"].transpose(2, 3).contiguous().transpose(2, 3)
    strided = {"q": q, "k": k, "v": v, "beta": wide[..., 1], "g": apart[..., ::2], "state": state}
    assert not any(x.is_contiguous() for x in strided.values())
    for a, b in zip(run(inputs | strided), expected, strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "state"])
def test_nan_stays_in_its_head(name: str) -> None:
    inputs = narrowed(draw(3), torch.float32)
    expected, after = run(inputs)
    inputs[name] = inputs[name].clone()
    index = (1, 0) if name == "state" else (1, 0, 0)
    inputs[name][index] = float("nan")
    out, last = run(inputs)
    assert after is not None and last is not None
    assert bool(out[1, 0, 0].isnan().all())
    clean = torch.ones(3, HEADS, dtype=torch.bool, device=DEVICE)
    clean[1, 0] = False
    assert torch.equal(out[:, 0][clean], expected[:, 0][clean])
    assert torch.equal(last[clean], after[clean])


def test_what_the_kernel_takes() -> None:
    def takes(changes: Inputs | None = None, given: Inputs | None = None) -> bool:
        found = (given or narrowed(draw(2), torch.bfloat16)) | (changes or {})
        q, k, v, g, beta = (found[name] for name in ("q", "k", "v", "g", "beta"))
        parameters = (found["A_log"], found["dt_bias"])
        return step.takes_step((q, k, v, g, beta), parameters, found["state"])

    assert takes() and takes(given=narrowed(draw(2, 128, 128), torch.float32))
    assert not takes(given=narrowed(draw(2, tokens=2), torch.bfloat16))
    assert not takes(given=narrowed(draw(2, 24, 16), torch.bfloat16))
    assert not takes(given=narrowed(draw(2, 16, 24), torch.bfloat16))
    assert not takes(given=narrowed(draw(2), torch.float64))
    assert not takes({"state": draw(2)["state"]})
    assert not takes({"state": draw(2)["state"].bfloat16()})
    weight = draw(2)["A_log"].float().requires_grad_()
    assert not takes({"A_log": weight})
    with torch.no_grad():
        assert takes({"A_log": weight})
    with torch.inference_mode():
        assert takes({"A_log": weight})
