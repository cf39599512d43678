"""Every objective against its formula and its derivative, both written out by hand per token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from farhorizon.rl.losses import (
    cispo,
    dapo,
    dr_grpo,
    gspo,
    k15,
    k25,
    ppo_clip,
    reinforce,
    rloo,
    sapo,
)
from farhorizon.rl.types import LossOutput

# Loss and derivative by the log-prob of each token of one sequence, from (logprob, behaviour, A).
Token = tuple[float, float, float]
Formula = Callable[[Sequence[Token]], list[tuple[float, float]]]


def hand_ppo(tokens: Sequence[Token], low: float, high: float, dual: float | None = None) -> Any:
    out = []
    for logprob, behavior, a in tokens:
        ratio = math.exp(logprob - behavior)
        inside = min(max(ratio, 1 - low), 1 + high)
        value, slope = (ratio * a, ratio * a) if ratio * a <= inside * a else (inside * a, 0.0)
        if dual is not None and a < 0 and value < dual * a:
            value, slope = dual * a, 0.0
        out.append((-value, -slope))
    return out


def hand_gspo(tokens: Sequence[Token], low: float, high: float) -> Any:
    n = len(tokens)
    ratio = math.exp(sum(logprob - behavior for logprob, behavior, _ in tokens) / n)
    inside = min(max(ratio, 1 - low), 1 + high)
    values = [min(ratio * a, inside * a) for _, _, a in tokens]
    slope = sum(ratio * a for _, _, a in tokens if ratio * a <= inside * a) / n
    return [(-value, -slope) for value in values]


def hand_cispo(tokens: Sequence[Token], low: float, high: float) -> Any:
    out = []
    for logprob, behavior, a in tokens:
        factor = min(max(math.exp(logprob - behavior), 1 - low), 1 + high)
        out.append((-factor * a * logprob, -factor * a))
    return out


def hand_sapo(tokens: Sequence[Token], pos: float, neg: float) -> Any:
    out = []
    for logprob, behavior, a in tokens:
        ratio, tau = math.exp(logprob - behavior), pos if a > 0 else neg
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        out.append((-4 / tau * gate * a, -4 * gate * (1 - gate) * ratio * a))
    return out


def hand_k25(tokens: Sequence[Token], low: float, high: float, tau: float) -> Any:
    out = []
    for logprob, behavior, a in tokens:
        apart = logprob - behavior
        ratio = math.exp(apart)
        open_ = 1 - low <= ratio <= 1 + high
        value = min(max(ratio, 1 - low), 1 + high) * a - tau * apart**2
        out.append((-value, -(open_ * ratio * a - 2 * tau * apart)))
    return out


def hand_k15(tokens: Sequence[Token], tau: float) -> Any:
    whole = sum(logprob - behavior for logprob, behavior, _ in tokens)
    out = []
    for logprob, behavior, a in tokens:
        apart = logprob - behavior
        out.append((-(a * apart - tau / 2 * apart * whole), -(a - tau * whole)))
    return out


def hand_reinforce(tokens: Sequence[Token]) -> Any:
    return [(-a * logprob, -a) for logprob, _, a in tokens]


CASES: dict[str, tuple[Callable[..., LossOutput], Formula]] = {
    "ppo_clip": (ppo_clip, partial(hand_ppo, low=0.2, high=0.2)),
    "ppo_asymmetric": (
        partial(ppo_clip, clip_low=0.1, clip_high=0.5),
        partial(hand_ppo, low=0.1, high=0.5),
    ),
    "dual_clip": (partial(ppo_clip, dual_clip=1.5), partial(hand_ppo, low=0.2, high=0.2, dual=1.5)),
    "dr_grpo": (dr_grpo, partial(hand_ppo, low=0.2, high=0.2)),
    "dapo": (dapo, partial(hand_ppo, low=0.2, high=0.28)),
    "gspo": (gspo, partial(hand_gspo, low=3e-4, high=4e-4)),
    "gspo_wide": (
        partial(gspo, clip_low=0.3, clip_high=0.6),
        partial(hand_gspo, low=0.3, high=0.6),
    ),
    "cispo": (cispo, partial(hand_cispo, low=1.0, high=4.0)),
    "cispo_narrow": (
        partial(cispo, clip_low=0.1, clip_high=0.3),
        partial(hand_cispo, low=0.1, high=0.3),
    ),
    "sapo": (partial(sapo, tau_pos=2.0, tau_neg=0.5), partial(hand_sapo, pos=2.0, neg=0.5)),
    "k25": (k25, partial(hand_k25, low=0.5, high=1.0, tau=0.01)),
    "k25_narrow": (
        partial(k25, clip_low=0.1, clip_high=0.2, tau=0.7),
        partial(hand_k25, low=0.1, high=0.2, tau=0.7),
    ),
    "k15_own": (k15, partial(hand_k15, tau=0.01)),
    "k15": (partial(k15, tau=0.3), partial(hand_k15, tau=0.3)),
    "reinforce": (reinforce, hand_reinforce),
    "rloo": (rloo, hand_reinforce),
}
CLIPPING = [n for n in CASES if not n.startswith(("sapo", "k15", "reinforce", "rloo"))]


@dataclass(frozen=True)
class Data:
    """Tokens of five sequences, one of a single token, with masked tokens of NaN between them."""

    logprobs: Tensor
    behavior: Tensor
    advantages: Tensor
    mask: Tensor
    sequence_ids: Tensor

    def of(self, ids: Sequence[int]) -> Data:
        rows = torch.isin(self.sequence_ids, torch.tensor(ids))
        return Data(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    def tokens(self, sequence: int) -> list[Token]:
        rows = torch.nonzero(self.mask & (self.sequence_ids == sequence)).flatten().tolist()
        columns = (self.logprobs.tolist(), self.behavior.tolist(), self.advantages.tolist())
        return [(columns[0][i], columns[1][i], columns[2][i]) for i in rows]


def data(apart: float = 0.4, seed: int = 0) -> Data:
    random = torch.Generator().manual_seed(seed)
    ids = torch.tensor([7] * 4 + [3] * 6 + [5] + [9] * 8 + [1] * 5)
    mask = torch.rand(len(ids), generator=random) < 0.7
    mask[[0, 4, 10, 11, 19]] = True  # at least one of each
    behavior = -3 * torch.rand(len(ids), generator=random, dtype=torch.float64) - 0.1
    noise = torch.randn(len(ids), generator=random, dtype=torch.float64)
    advantages = torch.randn(len(ids), generator=random, dtype=torch.float64)
    nan = torch.tensor(math.nan, dtype=torch.float64)
    logprobs, behavior, advantages = (
        torch.where(mask, x, nan) for x in (behavior + apart * noise, behavior, advantages)
    )
    return Data(logprobs, behavior, advantages, mask, ids)


def run(
    loss: Callable[..., LossOutput], own: Data, denominator: int, **kwargs: Any
) -> tuple[LossOutput, Tensor]:
    logprobs = own.logprobs.clone().requires_grad_()
    out = loss(
        logprobs,
        own.behavior,
        own.advantages,
        own.mask,
        sequence_ids=own.sequence_ids,
        denominator=denominator,
        **kwargs,
    )
    (gradient,) = torch.autograd.grad(out.loss, logprobs)
    return out, gradient


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("apart", [0.05, 0.4, 1.5])
def test_loss_and_gradient_are_those_written_out(name: str, apart: float) -> None:
    loss, formula = CASES[name]
    own = data(apart)
    got, gradient = run(loss, own, 10)
    value, slopes = 0.0, torch.zeros_like(gradient)
    for sequence in own.sequence_ids.unique().tolist():
        rows = own.mask & (own.sequence_ids == sequence)
        hand = formula(own.tokens(sequence))
        value += sum(v for v, _ in hand) / 10
        slopes[rows] = torch.tensor([s / 10 for _, s in hand], dtype=torch.float64)
    assert got.loss.item() == pytest.approx(value, rel=1e-12, abs=1e-14)
    assert torch.allclose(gradient, slopes, rtol=1e-12, atol=1e-14)
    assert gradient[~own.mask].tolist() == [0.0] * int((~own.mask).sum())


@pytest.mark.parametrize("name", CLIPPING)
def test_tokens_outside_of_the_range_are_counted(name: str) -> None:
    own = data(1.5)
    advantages = own.sequence_ids.double() - 4.5  # one for each sequence: its ratio clips all of it
    own = replace(own, advantages=advantages)
    got, gradient = run(CASES[name][0], own, 10)
    counted = round(10 * float(got.metrics["clip_fraction"]))
    assert 0 < counted < int(own.mask.sum())
    if name.startswith(("cispo", "k25")):
        low, high = (CASES[name][1].keywords[key] for key in ("low", "high"))  # type: ignore[attr-defined]
        ratio = (own.logprobs - own.behavior)[own.mask].exp()
        assert counted == int(((ratio < 1 - low) | (ratio > 1 + high)).sum())
    else:
        assert counted == int((gradient[own.mask] == 0).sum())


@pytest.mark.parametrize("name", CASES)
def test_distances_are_means_over_trained_tokens(name: str) -> None:
    own = data()
    count = int(own.mask.sum())
    got, _ = run(CASES[name][0], own, count)
    apart = (own.logprobs - own.behavior)[own.mask]
    want = {
        "ratio": apart.exp().mean(),
        "log_ratio_abs": apart.abs().mean(),
        "kl": (apart.exp() - 1 - apart).mean(),
    }
    for key, value in want.items():
        assert float(got.metrics[key]) == pytest.approx(float(value), rel=1e-12)
    assert float(got.maxima["log_ratio_max"]) == float(apart.abs().max())


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_any_split_into_micro_batches_gives_the_same(name: str, weighed: bool) -> None:
    own = data(0.8)
    weights = torch.rand(len(own.mask), generator=torch.Generator().manual_seed(1)).double()

    def part(ids: Sequence[int]) -> tuple[LossOutput, Tensor]:
        rows = torch.isin(own.sequence_ids, torch.tensor(ids))
        kwargs = {"weights": weights[rows]} if weighed else {}
        return run(CASES[name][0], own.of(ids), 20, **kwargs)

    whole, gradient = part([1, 3, 5, 7, 9])
    for split in ([[1], [3], [5], [7], [9]], [[9, 1], [7, 5, 3]], [[3, 5, 7, 9], [1]]):
        loss, metrics = 0.0, dict.fromkeys(whole.metrics, 0.0)
        for ids in split:
            got, slopes = part(ids)
            loss += got.loss.item()
            for key in metrics:
                metrics[key] += float(got.metrics[key])
            rows = torch.isin(own.sequence_ids, torch.tensor(ids))
            assert torch.allclose(slopes, gradient[rows], rtol=1e-12, atol=1e-15)
        assert loss == pytest.approx(whole.loss.item(), rel=1e-12)
        assert metrics == pytest.approx({k: float(v) for k, v in whole.metrics.items()}, rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_order_of_tokens_and_names_of_sequences_do_not_matter(name: str) -> None:
    own = data()
    order = torch.randperm(len(own.mask), generator=torch.Generator().manual_seed(2))
    mixed = Data(*(getattr(own, key)[order] for key in own.__dataclass_fields__))
    renamed = replace(mixed, sequence_ids=mixed.sequence_ids - 100)
    got, gradient = run(CASES[name][0], own, 20)
    again, slopes = run(CASES[name][0], renamed, 20)
    assert again.loss.item() == pytest.approx(got.loss.item(), rel=1e-12)
    assert torch.allclose(slopes, gradient[order], rtol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_on_the_policys_own_samples_all_have_the_policy_gradient(name: str) -> None:
    own = data()
    advantages = own.sequence_ids.double() - 4.5  # one for each sequence, as from groups
    own = Data(own.behavior, own.behavior, advantages, own.mask, own.sequence_ids)
    got, gradient = run(CASES[name][0], own, 20)
    want = torch.where(own.mask, -advantages / 20, 0.0)
    assert torch.allclose(gradient, want, rtol=1e-12)
    assert float(got.metrics.get("clip_fraction", 0.0)) == 0.0
    assert float(got.metrics["kl"]) == 0.0 and float(got.maxima["log_ratio_max"]) == 0.0


@pytest.mark.parametrize("name", CASES)
def test_without_a_trained_token_nothing_happens(name: str) -> None:
    own = data()
    none = torch.zeros_like(own.mask)
    nan = torch.full_like(own.logprobs, math.nan)
    got, gradient = run(CASES[name][0], Data(nan, nan, nan, none, own.sequence_ids), 1)
    assert got.loss.item() == 0.0 and not gradient.any()
    assert all(float(value) == 0.0 for value in [*got.metrics.values(), *got.maxima.values()])


@pytest.mark.parametrize("name", CASES)
def test_advantages_of_zero_leave_only_the_pull(name: str) -> None:
    own = data()
    got, gradient = run(
        CASES[name][0],
        Data(own.logprobs, own.behavior, own.advantages * 0, own.mask, own.sequence_ids),
        5,
    )
    if name.startswith("k"):
        towards = (own.logprobs - own.behavior).sign()[own.mask]
        assert got.loss.item() > 0
        if not name.startswith("k15"):  # there the whole sequence pulls
            assert torch.equal(gradient[own.mask].sign(), towards)
    else:
        assert got.loss.item() == 0.0 and not gradient.any()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("apart", [-1e4, -90.0, 90.0, 1e4])
def test_one_token_far_off_stays_finite(name: str, advantage: float, apart: float) -> None:
    row = torch.tensor([0.0])
    own = Data(row + min(apart, 0.0), row - max(apart, 0.0), row + advantage, row == 0, row.long())
    got, gradient = run(CASES[name][0], own, 1)
    assert math.isfinite(got.loss.item()) and math.isfinite(gradient.item())
    assert all(math.isfinite(v) for v in [*got.metrics.values(), *got.maxima.values()])
    if name.startswith(("ppo", "dr_grpo", "dapo", "gspo")):
        clipped = (apart > 0) == (advantage > 0)
        assert not clipped or gradient.item() == 0.0
    if name == "dual_clip" and apart > 0 > advantage:
        assert (got.loss.item(), gradient.item()) == (1.5, 0.0)
    if name.startswith("k25"):
        tau = 0.7 if name == "k25_narrow" else 0.01
        assert gradient.item() == pytest.approx(math.copysign(40 * tau, apart), rel=1e-5)


@pytest.mark.parametrize("name", ["ppo_clip", "dual_clip", "gspo"])
def test_a_token_that_the_policy_never_gives_has_ratio_zero(name: str) -> None:
    one = torch.tensor([1.0])
    own = Data(one * -math.inf, -one, one, one > 0, one.long())
    got, gradient = run(CASES[name][0], own, 1)
    assert got.loss.item() == 0.0 and gradient.item() == 0.0


@pytest.mark.parametrize("which", ["logprobs", "behavior", "advantages"])
@pytest.mark.parametrize("name", CASES)
def test_nan_under_the_mask_is_not_hidden(name: str, which: str) -> None:
    if name in ("reinforce", "rloo") and which == "behavior":
        return  # not in it
    own = data(0.02)  # within every window, outside of which a gradient does not ask for advantages
    row = int(torch.nonzero(own.mask)[0])
    getattr(own, which)[row] = math.nan
    got, gradient = run(CASES[name][0], own, 20)
    assert math.isnan(got.loss.item())
    if which != "logprobs" or not name.startswith(("reinforce", "rloo")):
        assert gradient[own.mask].isnan().any()


def some_weights(own: Data) -> Tensor:
    weights = torch.linspace(0.1, 2, len(own.mask), dtype=torch.float64)
    return torch.where(own.mask, weights, math.nan)


@pytest.mark.parametrize("name", ["ppo_clip", "cispo", "k25", "reinforce"])
def test_weights_multiply_the_gradients_of_single_tokens(name: str) -> None:
    own = data()
    weights = some_weights(own)
    _, plain = run(CASES[name][0], own, 20)
    _, gradient = run(CASES[name][0], own, 20, weights=weights)
    assert torch.allclose(gradient[own.mask], (plain * weights)[own.mask], rtol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["logprobs", "behavior", "advantages"])
@pytest.mark.parametrize("name", CASES)
def test_weight_zero_removes_whatever_a_token_has(name: str, which: str, bad: float) -> None:
    """Of GSPO a whole sequence: a ratio of some of its tokens would be another one."""
    own = data()
    weights = some_weights(own)
    first = int(torch.nonzero(own.mask)[0])
    removed = torch.arange(len(own.mask)) == first
    if name.startswith("gspo"):
        removed = own.sequence_ids == own.sequence_ids[first]
    weights[removed] = 0.0
    want, slopes = run(CASES[name][0], own, 20, weights=weights)
    broken = replace(own, **{which: getattr(own, which).clone()})
    getattr(broken, which)[first] = bad
    got, gradient = run(CASES[name][0], broken, 20, weights=weights)
    assert got.loss.item() == want.loss.item() and torch.equal(gradient, slopes)
    assert gradient.isfinite().all() and not gradient[removed].any()


@pytest.mark.parametrize("bad", [math.inf, -math.inf])
@pytest.mark.parametrize("name", CASES)
def test_an_infinity_outside_of_the_mask_makes_no_gradient(name: str, bad: float) -> None:
    own = data()
    far = replace(own, logprobs=torch.where(own.mask, own.logprobs, bad))
    want, slopes = run(CASES[name][0], own, 20)
    got, gradient = run(CASES[name][0], far, 20)
    assert got.loss.item() == want.loss.item() and torch.equal(gradient, slopes)


@pytest.mark.parametrize("name", CLIPPING)
def test_clipped_tokens_are_told_by_side(name: str) -> None:
    own = data()
    out, _ = run(CASES[name][0], own, 20)
    low, high = (float(out.metrics[f"clip_fraction_{side}"]) for side in ("low", "high"))
    assert low + high == pytest.approx(float(out.metrics["clip_fraction"]))
    raised = replace(own, behavior=own.behavior - 5, advantages=own.advantages.abs())
    out, _ = run(CASES[name][0], raised, 20)
    trained = int(own.mask.sum()) / 20
    assert float(out.metrics["clip_fraction_high"]) == pytest.approx(trained)
    assert float(out.metrics["clip_fraction_low"]) == 0
