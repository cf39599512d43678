"""Stand-ins shared by the tests: a scripted generator, a toy chat format, small environments.

The file is also an environment plug-in (``EnvConfig(plugins=(fakes.__file__,))``), so that worker
processes can build its environments.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import numpy as np
import torch

from farhorizon.envs import MessageEnv, ToolEnv, register, said, shown, tool
from farhorizon.envs.base import Observation, Step
from farhorizon.envs.types import Message
from farhorizon.policy import Policy
from farhorizon.policy.images import Placed
from farhorizon.policy.weights import (
    PolicyVersion,
    Publication,
    WeightManifest,
    pack,
    policy_digest,
)
from farhorizon.rollout.types import Completion, FinishReason, GeneratorCounters, SamplingParams


class WordChat:
    """A closed vocabulary; text is cut greedily into the longest known words.

    Id 0 ends a message, id 1 opens the policy's turn, words follow. Words that are parts of
    others (``he`` + ``llo`` = ``hello``) make encoding ambiguous, as real tokenizers are.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self._cut = re.compile("|".join(sorted(map(re.escape, words), key=len, reverse=True)))
        self.stop_token_ids = (0,)

    calls = False
    effort = None

    def ids(self, text: str) -> list[int]:
        return [2 + self.words.index(word) for word in self._cut.findall(text)]

    def prompt(self) -> list[int]:
        return [1]

    def render_reply(self, messages: Iterable[Message], room: int | None = None) -> list[int]:
        return [token for message in messages for token in self.ids(message.content)]

    def placed(self, token_ids: Sequence[int], messages: Iterable[Message]) -> tuple[Placed, ...]:
        return ()

    def text(self, sampled_ids: Sequence[int]) -> str:
        return "".join(self.words[t - 2] for t in sampled_ids if t >= 2)


class ScriptedGenerator:
    """Gives every session the same tokens: ``turns[k]`` for its k-th request, cut to the budget.

    ``requests`` records (known ids so far, budget) of every request.
    """

    def __init__(self, turns: Sequence[Sequence[int]], seed: int = 0) -> None:
        self.turns = turns
        self.seed = seed
        self.version = 0
        self.counters = GeneratorCounters()
        self.requests: list[tuple[list[int], int]] = []
        self._known: dict[int, list[int]] = {}
        self._asked: dict[int, tuple[int, SamplingParams]] = {}
        self._turn: dict[int, int] = {}

    @property
    def busy(self) -> bool:
        return bool(self._asked)

    def open(
        self,
        prompt: np.ndarray,
        keys: Sequence[int],
        params: SamplingParams,
        position: int | None = None,
        images: Sequence[Placed] = (),
    ) -> list[int]:
        first = len(self._turn)
        sessions = list(range(first, first + len(keys)))
        for session in sessions:
            self._known[session], self._turn[session] = [], -1
            self.extend(session, prompt, params)
        return sessions

    def extend(
        self,
        session: int,
        token_ids: np.ndarray,
        params: SamplingParams,
        images: Sequence[Placed] = (),
    ) -> None:
        assert params.max_tokens >= 1
        self._known[session] += token_ids.tolist()
        self._turn[session] += 1
        self._asked[session] = (self._turn[session], params)
        self.requests.append((list(self._known[session]), params.max_tokens))

    def step(self) -> list[tuple[int, Completion]]:
        out = []
        for session, (turn, params) in self._asked.items():
            ids = np.array(self.turns[turn][: params.max_tokens], np.int32)
            self._known[session] += ids.tolist()
            stopped = ids[-1] in params.stop_token_ids
            count = len(ids)
            out.append(
                (
                    session,
                    Completion(
                        ids,
                        np.full(count, -0.5, np.float32),
                        np.full(count, self.version, np.int32),
                        FinishReason.STOP if stopped else FinishReason.LENGTH,
                    ),
                )
            )
        self._asked = {}
        return out

    def updating(self, number: int) -> AbstractContextManager[None]:
        self.version = number
        return nullcontext()

    def close(self, session: int) -> None:
        del self._known[session]

    def clear(self) -> None:
        self._known, self._asked = {}, {}


def publish(
    policy: Policy, number: int, bucket_bytes: int = 4096, temperature: float = 1.0
) -> Publication:
    """What a learner that holds ``policy`` would publish, within one process."""
    state = policy.state_dict()
    manifest = WeightManifest.of(state)
    tensors = ((name, state[name]) for name in manifest.names)
    buckets, digests = pack(manifest, tensors, bucket_bytes, lambda bucket: bucket)
    ids = torch.arange(24) % policy.config.vocab_size
    with torch.no_grad():
        out = policy(ids[None], rows=torch.arange(23), targets=ids[1:], temperature=temperature)
    return Publication(
        PolicyVersion(number, policy_digest(manifest, digests)),
        manifest,
        tuple(buckets),
        digests,
        ids.numpy(),
        out.logprobs.numpy(),
        temperature,
        1e-4,
    )


class NeedsKeyword(Exception):
    """Cannot be unpickled: its constructor needs a keyword."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


class HoldsLock(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("holding a lock")
        self.lock = threading.Lock()


class Unprintable(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


ERRORS = {
    "plain": lambda: RuntimeError("the sandbox is gone"),
    "keyword": lambda: NeedsKeyword(code=7),
    "lock": HoldsLock,
    "unprintable": Unprintable,
    "exit": lambda: SystemExit(3),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


class ScriptedEnv(MessageEnv):
    """Shows ``prompt``, then ``replies`` one by one; the last answer earns ``reward`` and ends it.

    ``fail_at`` raises ``ERRORS[error]`` in that step, 0 meaning in reset. ``closed`` counts calls
    of `close` over all instances, ``built`` the instances, ``actions`` what was said. The metadata
    of a task replaces arguments of that name.
    """

    built: ClassVar[int] = 0
    closed: ClassVar[int] = 0

    def __init__(
        self,
        prompt: str = "go",
        replies: Sequence[str] = (),
        reward: Any = 1.0,
        fail_at: int | None = None,
        error: str = "plain",
        delay: float = 0.0,
    ) -> None:
        type(self).built += 1
        self.prompt, self.replies, self.reward = prompt, tuple(replies), reward
        self.fail_at, self.error, self.delay = fail_at, error, delay
        self.actions: list[str] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        for name, value in self.task.metadata.items() if self.task is not None else ():
            setattr(self, name, value)
        if self.fail_at == 0:
            raise ERRORS[self.error]()
        return (Message("user", self.prompt),), {}

    def step(self, action: str) -> Step:
        if self.delay:
            time.sleep(self.delay)
        self.actions.append(action)
        if self.fail_at == len(self.actions):
            raise ERRORS[self.error]()
        if len(self.actions) > len(self.replies):
            return (), self.reward, True, False, {}
        return self.reply(self.replies[len(self.actions) - 1])

    def close(self) -> None:
        type(self).closed += 1


register("scripted-v0", ScriptedEnv)


class PictureEnv(MessageEnv):
    """Two turns, each perhaps with a picture; reward 1 for an even number of letters thought.

    Every other task shows none at first; what is shown differs between instances, siblings too.
    """

    shows_images = True
    built: ClassVar[int] = 0

    def __init__(self) -> None:
        type(self).built += 1
        self.drawn = np.random.default_rng(type(self).built)
        self.turns = self.said = 0

    def picture(self) -> np.ndarray:
        height, width = self.drawn.integers(3, 9, 2)
        return self.drawn.integers(0, 256, (height, width, 3), dtype=np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.turns = self.said = 0
        if self.task is not None and self.task.seed % 2:
            return (Message("user", "no picture"),), {}
        return (shown("user", self.picture(), " and ", self.picture()),), {}

    def step(self, action: str) -> Step:
        self.turns, self.said = self.turns + 1, self.said + len(said(action).thinking)
        if self.turns == 1 and self.drawn.integers(2):
            return (shown("user", "now ", self.picture()),), 0.0, False, False, {}
        return self.finish(float(self.said % 2 == 0))


register("pictures-v0", PictureEnv)


class EvenEnv(MessageEnv):
    """One turn; reward 1 if the answer has an even number of characters, else 0; if ``odd``, for an
    odd one.

    A policy that knows nothing gets both rewards often, so that there is something to learn from.
    """

    def __init__(self, odd: bool = False) -> None:
        self.odd = odd

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        return (Message("user", f" {self.np_random.choice(['red', 'green', 'blue'])}"),), {}

    def step(self, action: str) -> Step:
        return self.finish(float(len(action) % 2 == self.odd))


register("even-v0", EvenEnv)


class TurnsEnv(MessageEnv):
    """Two turns; each earns 1 if its characters have an even sum. Tasks are of the kind low or max,
    and may take ``budget`` tokens."""

    def __init__(self, budget: int | None = 3) -> None:
        self.budget = budget

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.kind, self.turns = ("low", "max")[int(self.np_random.integers(2))], 0
        return (Message("user", " red"),), {}

    def step(self, action: str) -> Step:
        self.turns += 1
        reward = float(sum(map(ord, action)) % 2 == 0)
        return self.reply(" blue", reward=reward) if self.turns == 1 else self.finish(reward)


register("turns-v0", TurnsEnv)


class LampEnv(ToolEnv):
    """Two lamps to light, one after the other; a quarter of the reward for a wrong one."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.wanted = [str(w) for w in self.np_random.choice(["red", "green", "blue"], 2)]
        return (Message("user", self.wanted[0]),), {}

    @tool
    def light(self, lamp: str) -> Step:
        """Light one lamp."""
        reward = 0.5 if lamp == self.wanted.pop(0) else 0.125
        return self.reply(self.wanted[0], reward=reward) if self.wanted else self.finish(reward)

    def expert(self) -> str:
        return f"light {self.wanted[0]}"


register("lamps-v0", LampEnv)


class FakeMeter:
    """The CPU, where every call takes two milliseconds."""

    device = "cpu"

    def wait(self) -> None:
        pass

    def free(self) -> None:
        pass

    def milliseconds(self, call: Callable[[], object], repeats: int) -> float:
        call()
        return 2.0

    def plain_milliseconds(self, call: Callable[[], object], repeats: int) -> float:
        return self.milliseconds(call, repeats)

    def growth(self, call: Callable[[], object]) -> int:
        call()
        return 2**30
