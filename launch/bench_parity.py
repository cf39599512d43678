"""``farhorizon bench parity``: a random policy in stock vLLM beside our forward, on this GPU.

The policy is saved in the published layout and loaded from there by both sides. vLLM prefills
random prompts and samples behind them; our forward scores the same ids in bf16, and in fp32 to tell
whose rounding is whose. Mistakes made on purpose in our own copy show that the figures would show
them. Deviation: those are compared with our forward, not served.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..configs.benchmarks import ParityBenchConfig
from ..configs.bounds import check_bounds
from ..configs.errors import RunFailed, UserError
from ..policy import Policy, PolicyConfig
from ..policy.checkpoint import load_policy, save_policy
from ..rollout.vllm_probe import Served, serve
from .measure import versions
from .parity import (
    FAINT,
    MISTAKES,
    Agreement,
    Scored,
    by_position,
    compare_routes,
    logit_std,
    mistaken,
    random_policy,
    route_summary,
    score,
    summary,
)
from .plan import read_policy
from .prepare import check_writable

ALLOWED_MEAN, ALLOWED_MARGIN = 0.02, 2**-7  # nats, and of a biased score
_ROUTE_COLUMNS = ("routes.token", "routes.layer", "routes.margin")
LEAST_SHARED, LEAST_MOVED, LEAST_STD = 0.985, 0.1, 2.0


@dataclass(frozen=True, slots=True)
class Compared:
    """One sequence on the CPU: log-probs [T - 1] of vLLM and of our forward in bf16 and fp32, the
    position of each token, whether it was sampled, and the routes."""

    served: torch.Tensor
    ours: torch.Tensor
    exact: torch.Tensor
    position: torch.Tensor
    sampled: torch.Tensor
    routes: Agreement


def bench_parity(config: ParityBenchConfig) -> int:
    """Print the figures and write them to ``output``; returns 0. RunFailed if one is out of
    bounds."""
    check_bounds(config)
    if not config.lengths:
        raise UserError("lengths: name at least one length of a prompt")
    if not torch.cuda.is_available():
        raise UserError("bench parity needs a GPU, and torch sees none")
    if config.output is not None:
        check_writable(Path(config.output).absolute())
    device: Any = torch.device("cuda")  # transformers types `to` as taking no argument
    policy_config, _ = read_policy(config.policy)
    policy_config.max_position_embeddings = max(config.lengths) + config.sampled + 1
    prompts = draw_prompts(policy_config, config.lengths, config.seed)
    record: dict[str, Any] = {
        "benchmark": "parity",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "versions": versions(),
        "policy": policy_config.to_dict(),
        "lengths": config.lengths,
    }
    with tempfile.TemporaryDirectory(prefix="farhorizon-parity-") as folder:
        start = time.perf_counter()
        save_policy(folder, random_policy(policy_config, config.seed, "cuda"))
        policy = load_policy(folder, torch.bfloat16).to(device)
        _say("policy saved and loaded", start)
        record |= check_policy(policy, prompts)
        _say(f"logits of std {record['logit_std']:.2f}; {record['mistakes']}", start)
        served = serve(folder, prompts, config.sampled, config.seed)
        _say("served by vLLM", start)
        ours = score_all(policy, served)
        del policy
        exact = score_all(load_policy(folder, torch.float32).to(device), served)
        _say("scored by our forward", start)
    found = [compare(*parts) for parts in zip(served, ours, exact, strict=True)]
    record |= figures(found)
    if config.output is not None:
        write(Path(config.output), record, found)
    shown = ("logprobs", "routes", "mistakes", "faint")
    print(json.dumps({key: record[key] for key in shown}, indent=1))
    failures = judge(record)
    if failures:
        raise RunFailed("; ".join(failures))
    return 0


def draw_prompts(config: PolicyConfig, lengths: Sequence[int], seed: int) -> list[np.ndarray]:
    """Ids of the vocabulary, all equally likely."""
    random = np.random.default_rng(seed)
    return [random.integers(config.vocab_size, size=length) for length in lengths]


def check_policy(policy: Policy, prompts: Sequence[np.ndarray]) -> dict[str, Any]:
    """The spread of the logits, and how far each mistake moves log-probs (nats, the mean); the
    ``faint`` ones apart."""
    ids = torch.from_numpy(min(prompts, key=len)).to(policy.device)
    right = score(policy, ids).logprobs

    def moved(mistakes: Sequence[str]) -> dict[str, float]:
        found: dict[str, float] = {}
        for mistake in mistakes:
            with mistaken(policy, mistake):
                found[mistake] = float((score(policy, ids).logprobs - right).abs().mean())
        return found

    spread = logit_std(policy, ids)
    return {"logit_std": spread, "mistakes": moved(MISTAKES), "faint": moved(FAINT)}


def score_all(policy: Policy, served: Sequence[Served]) -> list[Scored]:
    """Our forward on the ids of each sequence, the results on the CPU."""
    found: list[Scored] = []
    for one in served:
        scored = score(policy, torch.from_numpy(one.token_ids).to(policy.device))
        found.append(Scored(scored.logprobs.cpu(), scored.routes.cpu(), scored.biased.cpu()))
    return found


def compare(served: Served, ours: Scored, exact: Scored) -> Compared:
    """One sequence; ours has only the layers with experts, the last ones of vLLM's."""
    layers = ours.routes.shape[1]
    routes = torch.from_numpy(served.routes[:, -layers:].astype(np.int64))
    position = torch.arange(1, len(served.token_ids))
    return Compared(
        torch.from_numpy(served.logprobs),
        ours.logprobs,
        exact.logprobs,
        position,
        position >= served.prompt,
        compare_routes(ours, routes),
    )


def figures(found: Sequence[Compared]) -> dict[str, Any]:
    """Of all sequences together: log-probs overall, by position and of sampled tokens; routes."""
    served, ours, exact, position, sampled = (
        torch.cat([getattr(one, name) for one in found])
        for name in ("served", "ours", "exact", "position", "sampled")
    )
    agreements = [one.routes for one in found]
    same = torch.cat([_same_routes(one) for one in found])
    difference = served - ours
    return {
        "logprobs": {
            "served_ours": summary(difference),
            "served_ours_by_position": by_position(difference, position),
            "served_ours_sampled": summary(difference[sampled]),
            "served_ours_same_routes": summary(difference[same]),
            "ours_fp32": summary(ours - exact),
            "served_fp32": summary(served - exact),
            "served_fp32_by_position": by_position(served - exact, position),
        },
        "routes": route_summary(agreements, ALLOWED_MARGIN),
    }


def _same_routes(one: Compared) -> torch.Tensor:
    same = torch.ones(len(one.position), dtype=torch.bool)
    same[one.routes.token] = False
    return same


def judge(record: dict[str, Any]) -> list[str]:
    """What is out of bounds; written so that a NaN is."""
    mean, routes = record["logprobs"]["served_ours"]["mean"], record["routes"]
    wrong = []
    if not mean < ALLOWED_MEAN:
        wrong.append(f"log-probs differ by {mean:.4f} nat, allowed {ALLOWED_MEAN}")
    if not routes["shared"] >= LEAST_SHARED:
        wrong.append(f"{routes['shared']:.2%} of expert slots shared, at least {LEAST_SHARED:.1%}")
    if not routes["margin_max"] < ALLOWED_MARGIN:
        wrong.append(f"routes differ at a margin of {routes['margin_max']:.4f}")
    if not record["logit_std"] >= LEAST_STD:
        wrong.append(f"logits of std {record['logit_std']:.2f}, at least {LEAST_STD}")
    for mistake, moved in record["mistakes"].items():
        if not moved > LEAST_MOVED:
            wrong.append(f"{mistake}: log-probs move by only {moved:.3f} nat")
    return wrong


def write(folder: Path, record: dict[str, Any], found: Sequence[Compared]) -> None:
    """``parity.json``, and ``parity.npz`` with log-probs and disagreements, ``sequence`` and
    ``route_sequence`` saying of which prompt each is."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "parity.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    served, ours, exact, token, layer, margin = (
        torch.cat([get(one) for one in found]).numpy()
        for get in map(attrgetter, ("served", "ours", "exact", *_ROUTE_COLUMNS))
    )
    counts = [len(one.served) for one in found], [len(one.routes.token) for one in found]
    sequence, route_sequence = (np.repeat(np.arange(len(n)), n) for n in counts)
    np.savez_compressed(
        folder / "parity.npz",
        served=served,
        ours=ours,
        exact=exact,
        sequence=sequence,
        token=token,
        layer=layer,
        margin=margin,
        route_sequence=route_sequence,
    )


def _say(text: str, start: float) -> None:
    print(f"{time.perf_counter() - start:6.1f} s  {text}", flush=True)
