"""Why success did not rise: the likely cause, from the rows of ``metrics.jsonl`` alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Rows = Sequence[dict[str, Any]]

MANY_FAILURES = 0.3  # share of episodes
APART = 0.05  # nats between rollout and learner on tokens of the same weights
COLLAPSED = 0.1  # entropy at the end, as a share of that at the start
ROSE = 0.1  # success
FEW = 20  # updates
LOST = 0.5  # share of tokens with routes; the last of each sequence has none
UNEVEN = 1.5  # load of the busiest expert at the end, times that at the start
NEAR, FAR = 1e-5, 1.0  # nats per token from the reference


def flat_line(rows: Rows, before: float | None, after: float | None) -> str | None:
    """The cause, where held-out success ``after`` the run is not above that ``before``; without
    both, where success of training did not rise over it. None where it rose."""
    steps = [row for row in rows if "train/update_skipped" in row]
    if before is None or after is None:
        if len(steps) < 2:
            return None
        before, after = _ends(steps, "train/success")
    if before is not None and after is not None and after > before:
        return None
    return why_flat(rows)


def why_flat(rows: Rows) -> str:
    """One line that names the first cause the numbers point to, the surest before the rest, and
    the way out."""
    steps = [row for row in rows if "train/update_skipped" in row]
    for cause in _CAUSES:
        if (found := cause(steps)) is not None:
            return found
    updates = sum(not row["train/update_skipped"] for row in steps)
    if updates == 0 and steps:
        return (
            f"none of {len(steps)} steps had anything to learn from: play more episodes a step, "
            "or name teachers of their kinds"
        )
    if updates < FEW:
        return f"only {updates} updates so far: raise steps"
    return f"no number of {updates} updates stands out: raise learner.lr, or read rollouts/"


def _failures(steps: Rows) -> str | None:
    failed, played = _sum(steps, "rollout/errors"), _sum(steps, "rollout/episodes")
    if failed <= MANY_FAILURES * played:
        return None
    return f"{failed:.0f} of {played:.0f} episodes failed and taught nothing: mend the environment"


def _cut(steps: Rows) -> str | None:
    cut, played = _sum(steps, "train/cut"), _sum(steps, "rollout/episodes")
    if 2 * cut <= played:
        return None
    return f"{cut:.0f} of {played:.0f} episodes did not fit the context: raise context"


def _not_finite(steps: Rows) -> str | None:
    bad, tried = _sum(steps, "learn/skipped_steps"), _sum(steps, "learn/optimizer_steps")
    if 2 * bad <= tried:
        return None
    return (
        f"the gradient was not finite in {bad:.0f} of {tried:.0f} optimizer steps: lower learner.lr"
    )


def _left_out(steps: Rows) -> str | None:
    both = ("learn/groups_left_out", "train/groups_without_variance")
    flat = sum(min(row[name] for name in both) for row in steps if all(n in row for n in both))
    return _equal_rewards(steps, flat)


def _without_variance(steps: Rows) -> str | None:
    """Groups that were learned from all the same, for what else acts on their tokens; a critic
    learns from any reward."""
    if _values(steps, "learn/value_error"):
        return None
    return _equal_rewards(steps, _sum(steps, "train/groups_without_variance"))


def _equal_rewards(steps: Rows, flat: float) -> str | None:
    groups = _sum(steps, "learn/groups")
    alone = _sum(steps, "learn/trajectories") <= groups  # there are no siblings to differ
    taught = (_mean(steps, "learn/teacher_tokens") or 0.0) > 0
    if 2 * flat <= groups or alone or taught:
        return None
    solved = (_mean(steps, "train/success") or 0.0) > 0.5
    way_out = "make the task harder" if solved else "warm up longer or make the task easier"
    outcome = "solved" if solved else "failed"
    return (
        f"{flat:.0f} of {groups:.0f} groups had equal rewards, most of them {outcome}: {way_out}, "
        "or raise group_size"
    )


def _stale(steps: Rows) -> str | None:
    stale, sampled = _sum(steps, "train/tokens_stale"), _sum(steps, "rollout/sampled_tokens")
    if 2 * stale <= sampled:
        return None
    return (
        f"{stale:.0f} of {sampled:.0f} sampled tokens were too old to learn from: raise "
        "max_staleness"
    )


def _apart(steps: Rows) -> str | None:
    own = [row for row in steps if row.get("learn/staleness_max") == 0]
    apart = _mean(own, "learn/log_ratio_first")
    if apart is None or apart <= APART:
        return None
    return (
        f"rollout and learner differ by {apart:.2g} nats per token on the same weights: their "
        "arithmetic differs; set algorithm.correction, and look at learn/kl_from_* for where"
    )


def _lost_routes(steps: Rows) -> str | None:
    known = _mean(steps, "learn/routes_known")
    if known is None or known >= LOST:
        return None
    return (
        f"only {known:.0%} of the tokens had routes of the rollout, the others chose their experts "
        "anew: set learner.replay=learner, or algorithm.correction"
    )


def _removed(steps: Rows) -> str | None:
    removed = _mean(steps, "learn/correction_removed")
    if removed is None or removed <= 0.5:
        return None
    return (
        f"algorithm.correction removed {removed:.0%} of the tokens: widen its range, or lower "
        "max_staleness or learner.minibatches"
    )


def _clipped(steps: Rows) -> str | None:
    clipped = _mean(steps, "learn/clip_fraction")
    if clipped is None or clipped <= 0.5:
        return None
    low, high = (_mean(steps, f"learn/clip_fraction_{side}") or 0.0 for side in ("low", "high"))
    return (
        f"{clipped:.0%} of the tokens were clipped ({low:.0%} below, {high:.0%} above the range): "
        "lower learner.lr or learner.minibatches"
    )


def _punished(steps: Rows) -> str | None:
    shaping = _mean(steps, "learn/reward_shaping")
    if shaping is None or shaping >= -0.5:
        return None
    return (
        f"length took {-shaping:.2f} off the mean reward: raise algorithm.budget or "
        "algorithm.overlong"
    )


def _collapsed(steps: Rows) -> str | None:
    entropy = _values(steps, "learn/entropy")
    if len(entropy) < 2 or entropy[-1] >= COLLAPSED * entropy[0]:
        return None
    return (
        f"entropy fell from {entropy[0]:.2g} to {entropy[-1]:.2g} nats, the policy repeats itself: "
        "lower learner.lr or set algorithm.entropy"
    )


def _uneven(steps: Rows) -> str | None:
    first, last = _ends(steps, "learn/expert_load_max")
    if first is None or last is None or last <= UNEVEN * first:
        return None
    return (
        f"the busiest expert went from {first:.2g} to {last:.2g} times the mean load: set "
        "learner.thresholds=track, or ema where a step has few sequences"
    )


def _reference(steps: Rows) -> str | None:
    _, last = _ends(steps, "learn/reference_kl")
    if last is None or NEAR < abs(last) < FAR:
        return None
    if abs(last) <= NEAR:
        return (
            f"the policy is {last:.2g} nats from its reference: lower algorithm.kl, or raise "
            "learner.lr"
        )
    return (
        f"the policy went {last:.2g} nats per token away from its reference: raise algorithm.kl or "
        "lower learner.lr"
    )


def _critic(steps: Rows) -> str | None:
    first, last = _ends(steps, "learn/value_error")
    if first is None or last is None or last <= 2 * first:
        return None
    return (
        f"the critic's error grew from {first:.2g} to {last:.2g}: lower learner.lr, or raise "
        "algorithm.value_coefficient"
    )


def _trained_only(steps: Rows) -> str | None:
    first, last = _ends(steps, "train/success")
    if first is None or last is None or last - first <= ROSE:
        return None
    return (
        f"training success rose from {first:.2f} to {last:.2f}, so the held-out tasks differ, or "
        "eval_episodes are too few to show it"
    )


_CAUSES: tuple[Callable[[Rows], str | None], ...] = (
    # nothing was learned from; what is too old or too long makes rewards equal, not they it
    *(_failures, _cut, _not_finite, _stale, _punished, _left_out),
    *(_apart, _lost_routes, _removed, _clipped),  # something else was learned
    *(_collapsed, _uneven, _reference, _critic),
    *(_without_variance, _trained_only),
)


def _values(rows: Rows, name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _sum(rows: Rows, name: str) -> float:
    return sum(_values(rows, name))


def _mean(rows: Rows, name: str) -> float | None:
    values = _values(rows, name)
    return sum(values) / len(values) if values else None


def _ends(steps: Rows, name: str) -> tuple[float | None, float | None]:
    """The means of the first and of the last quarter of the steps."""
    quarter = max(1, len(steps) // 4)
    return _mean(steps[:quarter], name), _mean(steps[-quarter:], name)
