"""Stock vLLM beside ``farhorizon bench decode``, on the same weights: an engine in a process of its
own, whose runs take turns with steps of ours.

What a run takes of a few tokens is subtracted from what one of more tokens takes: prompts are
prefilled in both, so that steps of all sequences alone are left.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

import numpy as np
import torch

from ..configs.errors import RunFailed, UserError, last_line
from ..policy import Policy
from ..rollout.vllm_probe import TIMED_BATCHED_TOKENS, Decoded
from .parity import score

PEERS = ("vllm",)
STEPS, ROUNDS = 384, 2
ALLOWED_LOGPROBS = 0.02  # nats, the mean over sampled tokens
LEAVE_SECONDS = 60.0


class Engine(Protocol):
    """What is timed."""

    def run(self, tokens: int, logprobs: bool) -> Decoded:
        """As `DecodeEngine.run`."""
        ...


@dataclass(frozen=True, slots=True)
class PeerTimed:
    """Milliseconds of a peer's step, the median of rounds and those; and of ours between them."""

    mode: str
    logprobs: bool
    milliseconds: float
    rounds: tuple[float, ...]
    ours: tuple[float, ...]
    error: float | None  # of its log-probs beside those of our forward, nats, the mean


def check_peers(names: Sequence[str]) -> None:
    """UserError for a name that no peer has."""
    for name in names:
        if name not in PEERS:
            raise UserError(f"peers: {name!r} is none; known: {', '.join(PEERS)}, or [] for none")


def few_tokens(sequences: int, context: int) -> int:
    """More than the steps that it takes until all sequences are sampled from."""
    return 2 * (sequences * context // TIMED_BATCHED_TOKENS) + 16


def prompt_length(sequences: int, context: int) -> int:
    """With which the sequences have ``context`` tokens in the middle of the steps that are timed;
    UserError if that is none."""
    sampled = few_tokens(sequences, context) + STEPS // 2
    if sampled >= context:
        raise UserError(f"context={context}: beside a peer it must be above {sampled}, or peers=[]")
    return context - sampled


def draw_prompts(vocabulary: int, sequences: int, length: int, seed: int) -> list[np.ndarray]:
    """Ids, all equally likely."""
    random = np.random.default_rng(seed)
    return list(random.integers(vocabulary, size=(sequences, length)))


def compare(
    engine: Engine,
    policy: Policy,
    prompts: Sequence[np.ndarray],
    context: int,
    mode: str,
    ours: Callable[[], float],
) -> Iterator[PeerTimed]:
    """Figures of an engine with log-probs and without; ``ours`` gives milliseconds of our step.

    RunFailed if what it samples in the steps that are timed has not the log-probs of our forward.
    """
    few = few_tokens(len(prompts), context)
    engine.run(few, logprobs=True)  # kernels are built and tuned
    for logprobs in (True, False):
        rounds: list[float] = []
        between: list[float] = [ours()]
        error = None
        for _ in range(ROUNDS):
            short = engine.run(few, logprobs)
            long = engine.run(few + STEPS, logprobs)
            rounds.append((long.seconds - short.seconds) / STEPS * 1e3)
            between.append(ours())
            found = logprob_error(policy, prompts[0], long)
            if found is None:
                continue
            if not found < ALLOWED_LOGPROBS:  # so that nan fails
                raise RunFailed(
                    f"vllm ({mode}): log-probs of what it sampled are {found:.4f} nat off ours, "
                    f"allowed {ALLOWED_LOGPROBS}: nothing is measured"
                )
            error = max(found, error or 0.0)
        middle = statistics.median(rounds)
        yield PeerTimed(mode, logprobs, middle, tuple(rounds), tuple(between), error)


def logprob_error(policy: Policy, prompt: np.ndarray, run: Decoded) -> float | None:
    """The mean difference of a run's log-probs and those of our forward; None where it has none."""
    if run.logprobs is None:
        return None
    ids = torch.from_numpy(np.concatenate((prompt, run.token_ids))).to(policy.device)
    ours = score(policy, ids).logprobs[len(prompt) - 1 :].float().cpu().numpy()
    return float(np.abs(ours - run.logprobs).mean())


class RemoteEngine:
    """An engine in another process, seen from here; RunFailed or UserError with what ended it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._answer()

    def run(self, tokens: int, logprobs: bool) -> Decoded:
        answer = self._answer((tokens, logprobs))
        assert isinstance(answer, Decoded)
        return answer

    def _answer(self, asked: tuple[int, bool] | None = None) -> Decoded | None:
        """What comes next, or what comes of a run that is asked for."""
        try:
            if asked is not None:
                self._pipe.send(asked)
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise RunFailed("vllm: its process ended while it worked") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


@contextmanager
def beside(start: Callable[[], Engine]) -> Iterator[RemoteEngine]:
    """The engine that ``start`` gives, in a process of its own: gone afterwards, and its memory."""
    context = multiprocessing.get_context("spawn")  # CUDA does not outlive a fork
    pipe, other = context.Pipe()
    process = context.Process(target=_work, args=(other, start))
    process.start()
    other.close()
    try:
        yield RemoteEngine(pipe)
        pipe.send(None)
        process.join(LEAVE_SECONDS)
    finally:
        pipe.close()
        if process.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # those that the engine started as well
            process.kill()
        process.join()


def _work(pipe: Connection, start: Callable[[], Engine]) -> None:
    os.setpgid(0, 0)
    try:
        engine = start()
        pipe.send(None)
        while (asked := pipe.recv()) is not None:
            pipe.send(engine.run(*asked))
    except EOFError:
        return  # nobody asks any more
    except (UserError, RunFailed) as error:
        pipe.send(error)
    except Exception as error:
        traceback.print_exc()
        pipe.send(RunFailed(f"vllm: {last_line(error)}"))
