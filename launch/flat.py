"""Why held-out success did not rise: the likely cause, from the rows of ``metrics.jsonl`` alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Rows = Sequence[dict[str, Any]]

MANY_FAILURES = 0.3  # share of episodes
APART = 0.05  # nats between rollout and learner on tokens of the same weights
COLLAPSED = 0.1  # entropy at the end, as a share of that at the start
ROSE = 0.1  # success
FEW = 20  # updates


def why_flat(rows: Rows) -> str:
    """One line that names the first cause the numbers point to, the surest before the rest, and
    the way out."""
    steps = [row for row in rows if "train/update_skipped" in row]
    for cause in _CAUSES:
        if (found := cause(steps)) is not None:
            return found
    updates = sum(not row["train/update_skipped"] for row in steps)
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
    bad = sum(skipped > 0 for skipped in _values(steps, "learn/skipped_steps"))
    if 2 * bad <= len(steps):
        return None
    return f"the gradient was not finite in {bad} of {len(steps)} steps: lower learner.lr"


def _equal_rewards(steps: Rows) -> str | None:
    flat, groups = _sum(steps, "train/groups_without_variance"), _sum(steps, "learn/groups")
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
    stale, groups = _sum(steps, "train/groups_stale"), _sum(steps, "train/groups")
    if 2 * stale <= groups:
        return None
    return f"{stale:.0f} of {groups:.0f} groups were too old to learn from: raise max_staleness"


def _apart(steps: Rows) -> str | None:
    own = [row for row in steps if row.get("learn/staleness_max") == 0]
    apart = _mean(own, "learn/log_ratio_first")
    if apart is None or apart <= APART:
        return None
    return (
        f"rollout and learner differ by {apart:.2g} nats per token on the same weights: their "
        "arithmetic differs; set algorithm.correction, and look at learn/kl_from_* for where"
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


def _trained_only(steps: Rows) -> str | None:
    third = len(steps) // 3
    first, last = (_mean(part, "train/success") for part in (steps[:third], steps[-third:]))
    if third == 0 or first is None or last is None or last - first <= ROSE:
        return None
    return (
        f"training success rose from {first:.2f} to {last:.2f}, so the held-out tasks differ, or "
        "eval_episodes are too few to show it"
    )


_CAUSES: tuple[Callable[[Rows], str | None], ...] = (
    *(_failures, _cut, _not_finite, _equal_rewards, _stale),  # nothing was learned from
    *(_apart, _removed, _clipped, _punished, _collapsed),  # something else was learned
    _trained_only,
)


def _values(rows: Rows, name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _sum(rows: Rows, name: str) -> float:
    return sum(_values(rows, name))


def _mean(rows: Rows, name: str) -> float | None:
    values = _values(rows, name)
    return sum(values) / len(values) if values else None
