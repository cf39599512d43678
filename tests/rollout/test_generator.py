"""Continuous batching against one sequence at a time, and weights that change underneath."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from farhorizon.configs.errors import RunFailed
from farhorizon.policy import Policy, PolicyConfig
from farhorizon.rollout.generator import NativeGenerator
from farhorizon.rollout.sampler import sample, stream_key
from farhorizon.rollout.types import Completion, FinishReason, SamplingParams

STOP = 3
PARAMS = SamplingParams(temperature=0.8, max_tokens=6, stop_token_ids=(STOP,))


@pytest.fixture(scope="module")
def policy() -> Policy:
    torch.manual_seed(0)
    return Policy(PolicyConfig.tiny(vocab_size=24, hidden_size=32, num_hidden_layers=2))


def alone(
    policy: Policy, ids: Sequence[int], key: int, params: SamplingParams
) -> tuple[list[int], list[float]]:
    """The same completion by running the whole sequence again for every token."""
    known, logprobs = list(ids), []
    for _ in range(params.max_tokens):
        with torch.inference_mode():
            logits = policy(torch.tensor([known]), last_only=True).logits
        token, logprob = sample(
            logits, params.temperature, np.array([key], np.uint64), np.array([len(known)])
        )
        known.append(int(token[0]))
        logprobs.append(float(logprob[0]))
        if known[-1] in params.stop_token_ids:
            break
    return known[len(ids) :], logprobs


def converse(
    generator: NativeGenerator,
    prompts: Sequence[np.ndarray],
    siblings: int,
    turns: int,
    check: Callable[[list[int], int, Completion], None],
) -> dict[int, list[int]]:
    """Talk to all prompts at once; returns all ids by key."""
    known: dict[int, list[int]] = {}
    keys: dict[int, int] = {}
    turn: dict[int, int] = {}
    for number, prompt in enumerate(prompts):
        own = [stream_key(0, str(number), i) for i in range(siblings)]
        for key, session in zip(own, generator.open(prompt, own, PARAMS), strict=True):
            keys[session], known[key], turn[key] = key, prompt.tolist(), 0
    while generator.busy:
        for session, completion in generator.step():
            key = keys[session]
            check(known[key], key, completion)
            known[key] += completion.token_ids.tolist()
            turn[key] += 1
            if turn[key] == turns:
                generator.close(session)
                continue
            reply = np.random.default_rng([key, turn[key]]).integers(4, 24, turn[key] * 7 % 13)
            known[key] += reply.tolist()
            generator.extend(session, reply, PARAMS)
    return known


def draw(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(4, 24, n).astype(np.int32) for n in lengths]


@pytest.mark.parametrize("prefill_tokens", [8192, 24])
def test_batched_sequences_equal_sequences_alone(policy: Policy, prefill_tokens: int) -> None:
    generator = NativeGenerator(policy, prefill_tokens=prefill_tokens)

    def check(known: list[int], key: int, completion: Completion) -> None:
        tokens, logprobs = alone(policy, known, key, PARAMS)
        assert completion.token_ids.tolist() == tokens
        np.testing.assert_allclose(completion.logprobs, logprobs, atol=2e-5)
        stopped = completion.finish is FinishReason.STOP
        assert stopped == (tokens[-1] == STOP) and (stopped or len(tokens) == 6)

    converse(generator, draw(1, 9, 40, 17), siblings=3, turns=3, check=check)
    assert not generator.busy and generator.step() == []
    assert generator._state is None and len(generator._rows) == 0  # nothing of a closed session


def test_siblings_share_one_prefill(policy: Policy) -> None:
    generator = NativeGenerator(policy)
    generator.open(draw(50)[0], [1, 2, 3, 4], PARAMS)
    while generator.busy:
        generator.step()
    assert generator.counters.prefill_tokens == 50
    assert generator.counters.prompt_tokens == 200
    assert generator.counters.reused_tokens == 150


def test_completions_longer_than_the_first_buffer(policy: Policy) -> None:
    generator = NativeGenerator(policy)
    params = SamplingParams(max_tokens=50)
    generator.open(draw(4)[0], [11], params)
    done = [c for _ in range(50) for c in generator.step()]
    ((_, completion),) = done
    assert completion.token_ids.tolist() == alone(policy, draw(4)[0].tolist(), 11, params)[0]


class Largest(TorchDispatchMode):
    """Size of the largest tensor that was made, views of what there is left out."""

    def __init__(self, there: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.there = {tensor.untyped_storage().data_ptr() for tensor in there}
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.untyped_storage().data_ptr() not in self.there
            ):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_a_step_does_not_copy_the_cache_when_sessions_wait() -> None:
    """Six of eight sessions go on: what a step makes does not grow with tokens x cache width."""
    torch.manual_seed(0)
    policy = Policy(PolicyConfig.tiny(vocab_size=24, hidden_size=32, num_hidden_layers=4))
    generator = NativeGenerator(policy)
    one = SamplingParams(max_tokens=1)
    sessions = [generator.open(p, [i], one)[0] for i, p in enumerate(draw(*[1000] * 8))]
    while generator.busy:
        generator.step()
    for waiting, session in enumerate(sessions):
        if waiting not in (2, 7):
            generator.extend(session, draw(3)[0], SamplingParams(max_tokens=20))
    for _ in range(3):
        generator.step()
    state = generator._state
    assert state is not None
    cache = state.layers[3].tensors()[0]
    rows, capacity, width = cache.shape
    assert rows == 8 and capacity >= 1000 and width > 4 * policy.config.num_attention_heads
    with Largest([cache]) as largest:
        generator.step()
    assert 0 < largest.elements < 6 * 1000 * width / 2
    assert state.layers[3].tensors()[0] is cache


def test_requests_below_one_token_are_refused(policy: Policy) -> None:
    generator = NativeGenerator(policy)
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        generator.open(draw(4)[0], [11], SamplingParams(max_tokens=0))
    assert not generator.busy


def shifted(policy: Policy, factor: float = 1.05) -> Policy:
    other = Policy(policy.config)
    other.load_state_dict({name: tensor * factor for name, tensor in policy.state_dict().items()})
    return other


def swap(generator: NativeGenerator, source: Policy) -> None:
    with generator.updating(generator.version + 1), torch.no_grad():
        for name, tensor in generator.policy.state_dict().items():
            tensor.copy_(source.state_dict()[name])


def greedy(generator: NativeGenerator, prompt: np.ndarray) -> Completion:
    (session,) = generator.open(prompt, [0], SamplingParams(temperature=0.0, max_tokens=12))
    done: list[tuple[int, Completion]] = []
    while generator.busy:
        done += generator.step()
    generator.close(session)
    return done[0][1]


def test_nothing_of_old_weights_reaches_a_new_sequence(policy: Policy) -> None:
    """C10: the second request equals that of a generator that only ever knew the new weights."""
    prompt = draw(64)[0]
    generator = NativeGenerator(shifted(policy, 1.0))
    old = greedy(generator, prompt)
    swap(generator, shifted(policy))
    before = generator.counters.prefill_tokens
    got, fresh = greedy(generator, prompt), greedy(NativeGenerator(shifted(policy)), prompt)
    assert generator.counters.prefill_tokens - before == 64
    assert got.token_ids.tolist() == fresh.token_ids.tolist()
    np.testing.assert_allclose(got.logprobs, fresh.logprobs, atol=1e-6)
    assert got.versions.tolist() == [1] * 12 and old.versions.tolist() == [0] * 12
    assert np.abs(got.logprobs - old.logprobs).max() > 1e-3


def test_a_prompt_that_is_half_done_starts_again_with_new_weights(policy: Policy) -> None:
    prompt = draw(64)[0]
    generator = NativeGenerator(shifted(policy, 1.0), prefill_tokens=40)
    generator.open(prompt, [5], PARAMS)
    assert generator.step() == []
    swap(generator, shifted(policy))
    done: list[tuple[int, Completion]] = []
    while generator.busy:
        done += generator.step()
    tokens, logprobs = alone(shifted(policy), prompt.tolist(), 5, PARAMS)
    assert done[0][1].token_ids.tolist() == tokens
    np.testing.assert_allclose(done[0][1].logprobs, logprobs, atol=2e-5)


def test_a_running_completion_says_which_weights_made_each_token(policy: Policy) -> None:
    generator = NativeGenerator(shifted(policy, 1.0))
    generator.open(draw(8)[0], [5], SamplingParams(max_tokens=6))
    for _ in range(2):
        generator.step()
    swap(generator, shifted(policy))
    done = [c for _ in range(4) for c in generator.step()]
    assert done[0][1].versions.tolist() == [0, 0, 1, 1, 1, 1]
    assert generator.counters.stale_tokens == 4


@pytest.mark.parametrize("keep_states", [0, 1])
@pytest.mark.parametrize("moment", ["waiting", "extended", "half read"])
def test_a_session_is_read_again_by_new_weights_unless_its_state_is_kept(
    policy: Policy, moment: str, keep_states: int
) -> None:
    """Whether weights change before or after the reply is given, or while it is being read."""
    generator = NativeGenerator(shifted(policy, 1.0), prefill_tokens=30, keep_states=keep_states)
    prompt, reply = draw(64, 50)
    sessions = generator.open(prompt, [5, 6], PARAMS)
    first = {s: c for _ in range(20) if generator.busy for s, c in generator.step()}
    known = {s: [*prompt.tolist(), *first[s].token_ids.tolist()] for s in sessions}
    before = replace(generator.counters)
    if moment == "waiting":
        swap(generator, shifted(policy))
    generator.extend(sessions[1], reply, PARAMS)
    fed = 0
    if moment == "half read":
        assert generator.step() == []
        fed = 30
    if moment != "waiting":
        swap(generator, shifted(policy))
    ((session, got),) = [c for _ in range(20) if generator.busy for c in generator.step()]
    assert session == sessions[1] and got.versions.tolist() == [1] * len(got.token_ids)
    renewed = generator.counters.renewed_tokens - before.renewed_tokens
    stale = generator.counters.stale_tokens - before.stale_tokens
    ids = [*known[session], *reply.tolist()]
    tokens, logprobs = alone(shifted(policy), ids, 6, PARAMS)
    if keep_states:
        assert (renewed, stale) == (0, len(got.token_ids))
        count = min(len(tokens), len(got.logprobs))
        assert np.abs(got.logprobs[:count] - logprobs[:count]).max() > 1e-3
        return
    assert (renewed, stale) == (len(known[session]) - 1 + fed, 0)
    assert got.token_ids.tolist() == tokens
    np.testing.assert_allclose(got.logprobs, logprobs, atol=2e-5)
    # the one that still waits is read again when its turn comes, the other goes on
    own = {s: known[s] for s in sessions} | {session: [*ids, *tokens]}
    for number, s in enumerate(sessions):
        generator.extend(s, reply, PARAMS)
        own[s] = [*own[s], *reply.tolist()]
        ((_, completion),) = [c for _ in range(20) if generator.busy for c in generator.step()]
        expected = alone(shifted(policy), own[s], 5 + number, PARAMS)[0]
        assert completion.token_ids.tolist() == expected
    assert generator.counters.renewed_tokens == renewed + len(known[sessions[0]]) - 1


def test_a_waiting_thread_gets_in_between_steps(policy: Policy) -> None:
    generator = NativeGenerator(policy)
    generator.open(draw(4)[0], [1], SamplingParams(max_tokens=100_000))
    entered, stop = threading.Event(), threading.Event()

    def wait_for_turn() -> None:
        with generator.exclusive():
            entered.set()
        stop.set()

    generator.step()
    thread = threading.Thread(target=wait_for_turn)
    for number in count():
        if number == 2:
            thread.start()
        generator.step()
        if stop.is_set():
            break
        assert number < 50, "the stepping thread starved the waiting one"
    thread.join()
    assert entered.is_set()


def test_memory_that_does_not_suffice_names_the_layer_and_a_way_out() -> None:
    policy = Policy(PolicyConfig.tiny(vocab_size=24, hidden_size=32, num_hidden_layers=2))
    text = "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 80 GiB."

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError(text)

    policy.model.layers[1].register_forward_pre_hook(full)
    generator = NativeGenerator(policy)
    generator.open(np.array([5, 6]), [1], PARAMS)
    with pytest.raises(RunFailed) as caught:
        generator.step()
    told = str(caught.value)
    assert told.startswith("rollout: the GPU's memory does not suffice for 1.50 GiB in model (")
    assert "lower rollout.concurrency" in told and "\n" not in told
