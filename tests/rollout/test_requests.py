"""Sessions over an engine that takes whole requests."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from farhorizon.configs.errors import RunFailed, UserError
from farhorizon.policy.images import Patches, Placed
from farhorizon.rollout.requests import Answer, Request, RequestGenerator, request_seed
from farhorizon.rollout.types import Completion, SamplingParams

from .hash_engine import HashEngine, play

PROMPT = np.arange(1, 11)
FOUR = SamplingParams(max_tokens=4)


def test_siblings_wait_for_the_state_of_their_prompt() -> None:
    engine = HashEngine()
    generator = RequestGenerator(engine)
    sessions = generator.open(PROMPT, [7, 8, 9], FOUR)
    assert [(r.session, r.leads) for r in engine.requests] == [(sessions[0], True)]
    assert generator.step() == []
    assert [r.session for r in engine.requests] == sessions
    found = play(generator)
    assert sorted(found) == sessions
    assert len({tuple(found[s].token_ids) for s in sessions}) == 3
    counters = generator.counters
    assert (counters.prompt_tokens, counters.reused_tokens, counters.prefill_tokens) == (30, 18, 12)
    assert (counters.sampled_tokens, counters.renewed_tokens, counters.steps) == (12, 0, 5)


def test_a_first_token_that_ends_the_completion_starts_the_siblings_too() -> None:
    engine = HashEngine()
    generator = RequestGenerator(engine)
    sessions = generator.open(PROMPT, [7, 8], SamplingParams(max_tokens=1))
    assert [session for session, _ in generator.step()] == [sessions[0]]
    assert [session for session, _ in generator.step()] == [sessions[1]]
    assert not generator.busy and generator.step() == []


def test_company_changes_no_sample() -> None:
    alone, crowd = RequestGenerator(HashEngine()), RequestGenerator(HashEngine())
    one = alone.open(PROMPT, [8], FOUR)[0]
    crowd.open(PROMPT[:3], [1, 2], SamplingParams(max_tokens=9))
    crowd.step()
    two = crowd.open(PROMPT, [7, 8], FOUR)[1]
    assert play(alone)[one].token_ids.tolist() == play(crowd)[two].token_ids.tolist()


def test_a_turn_is_a_request_with_all_before_it() -> None:
    engine = HashEngine()
    generator = RequestGenerator(engine)
    session = generator.open(PROMPT, [7], FOUR, position=30)[0]
    first = play(generator)[session].token_ids.tolist()
    generator.extend(session, np.array([3, 4]), FOUR)
    play(generator)
    assert engine.requests[1].token_ids.tolist() == [*PROMPT.tolist(), *first, 3, 4]
    assert [r.seed for r in engine.requests] == [request_seed(7, 30), request_seed(7, 36)]
    assert generator.counters.prompt_tokens == 12
    assert generator.counters.prefill_tokens == 10 + 3  # the last token drawn, and two given
    assert generator.counters.renewed_tokens == 0
    generator.close(session)
    with pytest.raises(KeyError):
        generator.extend(session, np.array([1]), FOUR)


@pytest.mark.parametrize("keep", [0, 2, 3])
def test_states_of_old_weights_are_read_again_unless_kept(keep: int) -> None:
    engine = HashEngine()
    generator = RequestGenerator(engine, keep_states=keep)
    session = generator.open(PROMPT, [7], FOUR)[0]
    generator.step()
    generator.version = 3
    completion = play(generator)[session]
    assert completion.versions.tolist() == [0, 3, 3, 3]
    assert generator.counters.stale_tokens == 3
    generator.extend(session, np.array([3]), FOUR)
    assert play(generator)[session].versions.tolist() == [3] * 4
    assert generator.counters.renewed_tokens == (0 if keep == 3 else 13)
    assert [r.salt for r in engine.requests] == (["0", "0"] if keep == 3 else ["0", "3"])
    other = generator.open(PROMPT, [8], FOUR)[0]  # which never begins with old states
    play(generator)
    assert engine.requests[-1].session == other and engine.requests[-1].salt == "3"


@pytest.mark.parametrize("keep", [0, 3])
def test_requests_without_a_token_are_made_anew_for_new_weights(keep: int) -> None:
    """One that the engine had queued would find states of old weights under its old salt."""
    engine = HashEngine()
    generator = RequestGenerator(engine, keep_states=keep)
    waiting = generator.open(PROMPT[:3], [5], FOUR)[0]
    play(generator)
    running = generator.open(PROMPT[:2], [9], FOUR)[0]
    generator.step()
    first = generator.open(PROMPT, [7, 8], FOUR)[0]
    generator.extend(waiting, np.array([3]), FOUR)
    with generator.updating(3):
        pass
    late = generator.open(PROMPT[:5], [6], FOUR)[0]
    found = play(generator)
    asked = [(r.session, r.salt) for r in engine.requests[1:]]
    assert asked[:3] == [(running, "0"), (first, "0"), (waiting, "0")]
    assert asked[3] == (late, "3") and (first, "3") in asked[4:] and (first + 1, "3") in asked[4:]
    assert ((waiting, "3") in asked) == (keep == 0)
    again = next(r for r in engine.requests[5:] if r.session == first)
    assert again.leads and again.seed == engine.requests[2].seed
    assert generator.counters.discarded_tokens == 0
    assert found[running].versions.tolist() == [0, 3, 3, 3]
    for session in (first, first + 1, late, waiting):
        assert found[session].versions.tolist() == [3] * 4


def test_weights_change_between_two_steps_and_never_within_one() -> None:
    class Slow(HashEngine):
        busy = changing = False
        count = 0

        def step(self) -> tuple[list[int], list[Answer]]:
            assert not self.changing
            self.busy = True
            time.sleep(1e-3)
            self.busy = False
            self.count += 1
            return super().step()

        def add(self, request: Request) -> None:
            assert not self.changing
            super().add(request)

    engine, stop = Slow(limit=400), threading.Event()
    generator = RequestGenerator(engine)
    found: list[Completion] = []

    def sample() -> None:
        while not stop.is_set():
            generator.open(PROMPT, [1, 2], SamplingParams(max_tokens=5))
            found.extend(play(generator).values())

    thread = threading.Thread(target=sample)
    thread.start()
    for number in (1, 2, 3, 4):
        goal = engine.count + 20
        while engine.count < goal and thread.is_alive():
            time.sleep(1e-3)
        with generator.updating(number):
            engine.changing = True
            assert not engine.busy
            time.sleep(5e-3)
            assert not engine.busy
            engine.changing = False
    assert thread.is_alive()
    stop.set()
    thread.join()
    assert {v for one in found for v in one.versions.tolist()} >= {0, 1, 2, 3}


def test_clear_forgets_what_runs_and_what_waits() -> None:
    engine = HashEngine()
    generator = RequestGenerator(engine)
    generator.open(PROMPT, [7, 8], FOUR)
    generator.open(PROMPT[:2], [9], FOUR)
    generator.clear()
    assert not generator.busy and engine.step() == ([], [])
    session = generator.open(PROMPT, [7], FOUR)[0]
    assert session == 3 and list(play(generator)) == [3]


def test_what_cannot_be_asked_for() -> None:
    generator = RequestGenerator(HashEngine(limit=12))
    with pytest.raises(UserError, match="context=12: a sequence of 10 tokens with 4 to sample"):
        generator.open(PROMPT, [7], FOUR)
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        generator.open(PROMPT, [7], SamplingParams(max_tokens=0))
    with pytest.raises(ValueError, match="needs a prompt token"):
        generator.open(PROMPT[:0], [7], FOUR)
    image = Placed(0, Patches(np.zeros((1, 3, 2, 2), np.uint8), (1, 1, 1), 1))
    with pytest.raises(UserError, match="takes no images"):
        generator.open(PROMPT, [7], FOUR, images=[image])
    session = generator.open(PROMPT[:4], [7], FOUR)[0]
    play(generator)
    with pytest.raises(UserError, match="a sequence of 9 tokens with 4"):
        generator.extend(session, np.array([1]), FOUR)
    assert not generator.busy


def test_a_log_prob_that_is_none_stops_the_run() -> None:
    generator = RequestGenerator(HashEngine(logprob=float("-inf")))
    generator.open(PROMPT, [7], SamplingParams(max_tokens=1))
    with pytest.raises(RunFailed, match="a log-prob is not finite"):
        generator.step()
    generator.clear()  # of a request that the engine has forgotten
    assert not generator.busy


def test_completions_have_the_routes_of_what_was_read_since_the_last_one() -> None:
    """Also over a change of weights, after which all is read again."""
    generator = RequestGenerator(HashEngine(routed=True))
    sessions = generator.open(PROMPT, [7, 8], FOUR)
    first = play(generator)
    for session in sessions:
        routes = first[session].routes
        assert routes is not None and routes.shape == (13, 1, 1)
        assert routes[:, 0, 0].tolist() == [*PROMPT, *first[session].token_ids[:-1]]
    with generator.updating(1):
        pass
    generator.extend(sessions[0], np.array([60, 61]), FOUR)
    second = play(generator)[sessions[0]]
    assert second.routes is not None
    last = int(first[sessions[0]].token_ids[-1])
    assert second.routes[:, 0, 0].tolist() == [last, 60, 61, *second.token_ids[:-1]]


def test_answers_without_the_routes_of_all_their_tokens_end_the_run() -> None:
    generator = RequestGenerator(HashEngine(routed=True, lost=1))
    generator.open(PROMPT, [7], FOUR)
    with pytest.raises(RunFailed, match="routes of 12 tokens where those of tokens 0 to 13 were"):
        play(generator)
