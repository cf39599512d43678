"""The archive environment: its rules, its horizon, its chance level, its bad input."""

from __future__ import annotations

import time
import tracemalloc
from collections import Counter
from typing import Any

import pytest

from farhorizon.configs.errors import UserError
from farhorizon.envs import make
from farhorizon.envs.archive import Archive


def archive(**kwargs: Any) -> Archive:
    env = make("archive-v0", **kwargs)
    assert isinstance(env, Archive)
    return env


def play_expert(env: Archive, seed: int) -> tuple[list[str], float]:
    """What was shown and said, and the total reward."""
    shown, _ = env.reset(seed=seed)
    texts = [m.content for m in shown]
    total, over = 0.0, False
    while not over:
        action = env.expert()
        shown, reward, over, truncated, info = env.step(action)
        assert not truncated and info == {}
        texts += [action, *(m.content for m in shown)]
        total += reward
    return texts, total


def reach_question(env: Archive, seed: int) -> None:
    env.reset(seed=seed)
    while not env.expert().strip().startswith("answer"):
        env.step(env.expert())


@pytest.mark.parametrize(
    "kwargs",
    [
        {"pages": 1},
        {"pages": 2},
        {"pages": 3, "names": 4, "records_per_page": 1},
        {"pages": 8},
        {"pages": 17, "records_per_page": 6},
        {"pages": 40, "sources": 12, "names": 24},
        {"tokens": 512},
        {"pages": 8, "style": "full"},
        {"pages": 6, "style": "full", "sources": None, "names": None},
    ],
)
def test_expert_succeeds_on_50_seeds(kwargs: dict[str, Any]) -> None:
    env = archive(**kwargs)
    for seed in range(50):
        texts, total = play_expert(env, seed)
        assert total == 1.0
        assert len(texts) == 2 * (env.pages + 2)  # go, pages, question, each with its reply


def test_an_episode_as_it_is_shown() -> None:
    env = archive(pages=2)
    texts, _ = play_expert(env, 5)
    (first, _), (second, _) = env.page(0), env.page(1)
    assert first is not None and second is not None  # two pages leave one page in the first half
    assert texts[0] == " go" and texts[1] == " next"
    assert texts[2].startswith(f" * {first.name} {first.source} ") and len(texts[2].split()) == 5
    assert texts[3] == f" note {first.name} {first.source}"
    assert texts[5] == f" note {second.name} {second.source}"
    assert texts[6] == f" ? {first.name}" and texts[7] == f" answer {first.name} {first.source}"
    assert set(" ".join(texts).split()) <= set(env.vocabulary)


def test_a_seed_fixes_the_episode_and_seeds_differ() -> None:
    one, other = archive(pages=12), archive(pages=12)
    episodes = [play_expert(one, seed)[0] for seed in range(20)]
    assert episodes == [play_expert(other, seed)[0] for seed in range(20)]
    assert len({tuple(texts) for texts in episodes}) == 20
    one.reset(seed=4)
    following = [one.reset()[0] and one.page(0) for _ in range(3)]
    one.reset(seed=4)
    assert following == [one.reset()[0] and one.page(0) for _ in range(3)]


def test_stars_are_unique_half_the_pages_and_never_distractors() -> None:
    env = archive(pages=16)
    asked_pages = []
    for seed in range(100):
        reach_question(env, seed)
        pages = [env.page(k) for k in range(16)]
        starred = [fact.name for fact, _ in pages if fact is not None]
        others = {fact.name for _, facts in pages for fact in facts}
        assert len(starred) == len(set(starred)) == 8
        assert not others & set(starred)
        assert all(len(facts) == 2 - (fact is not None) for fact, facts in pages)
        answer = env.expert().split()[2]
        name = [fact for fact, _ in pages if fact is not None and fact.source == answer]
        assert name  # the answer was on a starred record
        asked_pages.append(min(k for k, (fact, _) in enumerate(pages) if fact in name))
    assert max(asked_pages) < 8  # from the first half


def test_every_star_of_the_first_half_is_asked_about_equally_often() -> None:
    env = archive(pages=9)  # blocks 0-1, 2-3 and the first page of block 4-5 lie in the first half
    counts: Counter[int] = Counter()
    for seed in range(900):
        env.reset(seed=seed)
        stars = [k for k in range(5) if env.page(k)[0] is not None]
        reach_question(env, seed)
        asked = env._question
        assert asked is not None
        counts[[env.page(k)[0] for k in stars].index(asked) if len(stars) == 2 else 9] += 1
    assert counts[0] + counts[1] > 350
    assert abs(counts[0] - counts[1]) < 70  # three and a half standard deviations


@pytest.mark.parametrize(
    "actions",
    [
        [""],
        ["turn"],
        ["next now"],
        ["note"],
        ["note get"],
        ["note a b c"],
        ["answer"],
        ["answer xml xml xml"],
        ["NEXT"],
        ["\u2603"],
        ["next", "answer get xml"],
        ["expert"],
        ["reset"],
    ],
)
def test_invalid_actions_end_the_episode_with_zero(actions: list[str]) -> None:
    env = archive(pages=8)
    env.reset(seed=0)
    results = [env.step(action) for action in actions]
    assert results[-1] == ((), 0.0, True, False, {})
    assert not any(over for _, _, over, _, _ in results[:-1])


@pytest.mark.parametrize(
    "action", ["next", "note get xml", "answer nowhere", "answer get nowhere", "what"]
)
def test_only_the_right_answer_is_rewarded_at_the_question(action: str) -> None:
    env = archive(pages=4)
    reach_question(env, 0)
    assert env.step(action) == ((), 0.0, True, False, {})


def answer_with(env: Archive, *, note: str) -> float:
    """Turn all pages, noting stars ``right``, ``wrong`` or not at all, then answer rightly."""
    env.reset(seed=1)
    while not env.expert().strip().startswith("answer"):
        _, *words = env.expert().split()
        wrong = f"note {words[0]} nowhere" if words else "next"
        env.step({"right": env.expert(), "wrong": wrong, "none": "next"}[note])
    return env.step(env.expert())[1]


def test_the_note_must_have_been_made_and_right() -> None:
    env, free = archive(pages=8), archive(pages=8, require_note=False)
    assert answer_with(env, note="right") == 1.0
    assert answer_with(env, note="wrong") == 0.0
    assert answer_with(env, note="none") == 0.0
    assert answer_with(free, note="none") == 1.0


def test_a_wrong_note_can_be_corrected() -> None:
    env = archive(pages=2)
    env.reset(seed=0)
    env.step("next")
    fact = env.page(0)[0]
    assert fact is not None
    env.step(f"note {fact.name} nowhere")
    env.step(f"note {fact.name} {fact.source}")
    assert env.step(f"answer {fact.name} {fact.source}")[1] == 1.0


@pytest.mark.parametrize(("slots", "reward"), [(None, 1.0), (3, 1.0), (2, 0.0)])
def test_a_full_notebook_loses_its_oldest_note(slots: int | None, reward: float) -> None:
    """Three notes in all, the wanted one first."""
    env = archive(pages=3, slots=slots)
    env.reset(seed=next(s for s in range(99) if starred_first(env, s)))
    env.step("next")
    fact = env.page(0)[0]
    assert fact is not None
    for note in (f"{fact.name} {fact.source}", "a b", "c d"):
        env.step(f"note {note}")
    assert env.step(f"answer {fact.name} {fact.source}")[1] == reward


def starred_first(env: Archive, seed: int) -> bool:
    env.reset(seed=seed)
    while not env.expert().strip().startswith("answer"):
        env.step(env.expert())
    asked, first = env._question, env.page(0)[0]
    return first is not None and asked == first


def test_an_eager_expert_notes_more_and_still_succeeds_while_there_is_room() -> None:
    counts = {}
    for eager in (0.0, 0.5, 1.0):
        env = archive(pages=8, slots=8, eager=eager)
        played = [play_expert(env, seed) for seed in range(40)]
        assert all(total == 1.0 for _, total in played)
        counts[eager] = sum(text.startswith(" note") for texts, _ in played for text in texts)
    assert counts[0.0] == 40 * 4 and counts[1.0] == 40 * 8
    assert 40 * 5 < counts[0.5] < 40 * 7
    long = archive(pages=32, slots=8, eager=1.0)
    assert sum(play_expert(long, seed)[1] for seed in range(20)) == 0


def test_lengths_vary_between_min_pages_and_pages() -> None:
    env = archive(pages=6, min_pages=3)
    lengths = []
    for seed in range(60):
        texts, total = play_expert(env, seed)
        assert total == 1.0
        lengths.append(len(texts) // 2 - 2)  # what else is said and shown: go, next, ?, answer
        assert lengths[-1] == env.pages
    assert set(lengths) == {3, 4, 5, 6}
    with pytest.raises(UserError, match="min_pages"):
        archive(pages=6, min_pages=7)


def test_stars_can_be_as_dense_as_pages_and_vary() -> None:
    env = archive(pages=7, stars=7, min_stars=2, min_pages=3)
    seen = set()
    for seed in range(80):
        texts, total = play_expert(env, seed)
        assert total == 1.0
        notes = sum(text.startswith(" note") for text in texts)
        assert 2 <= notes <= min(7, env.pages)
        seen.add((env.pages, notes))
    assert (7, 7) in seen and (3, 2) in seen and len(seen) > 12
    assert sum(t.startswith(" note") for t in play_expert(archive(pages=36, stars=8), 0)[0]) == 8
    with pytest.raises(UserError, match="min_stars"):
        archive(pages=6, min_stars=2)


def test_chance_is_what_the_best_memoryless_guess_reaches() -> None:
    env = archive(pages=4)
    by_name: dict[str, Counter[str]] = {}
    rewards = []
    for seed in range(3000):
        reach_question(env, seed)
        asked = env._question
        assert asked is not None
        counts = by_name.setdefault(asked.name, Counter())
        if seed >= 1500:  # guess what was most frequent for this name so far
            guess = counts.most_common(1)[0][0]
            rewards.append(env.step(f"answer {asked.name} {guess}")[1])
        counts[asked.source] += 1
    assert env.chance <= 1 / 4
    assert abs(sum(rewards) / len(rewards) - env.chance) < 0.04  # 3.7 standard deviations
    expected = sum(1 / len(facts) for facts in env.table.facts.values()) / len(env.table.names)
    assert env.chance == pytest.approx(expected)


@pytest.mark.parametrize("tokens", [512, 2048, 8192])
def test_tokens_give_about_that_many_tokens(tokens: int) -> None:
    texts, _ = play_expert(archive(tokens=tokens), 0)
    # A message costs its words and 4 tokens of chat format (role, delimiters, end).
    assert sum(len(text.split()) + 4 for text in texts) == pytest.approx(tokens, rel=0.1)


def test_a_million_tokens_are_generated_lazily() -> None:
    env, fresh = archive(tokens=1_000_000), archive(tokens=1_000_000)
    assert env.pages > 50_000
    tracemalloc.start()
    started = time.perf_counter()
    env.reset(seed=7)
    numbers = range(env.pages - 1, 0, -(env.pages // 500))
    late = [env.page(k) for k in numbers]  # page k without pages 0..k-1
    assert time.perf_counter() - started < 5
    assert tracemalloc.get_traced_memory()[1] < 2 << 20
    tracemalloc.stop()
    fresh.reset(seed=7)
    shown = {}
    for number in range(2000):
        shown[number] = fresh.step("next")[0]
    known = fresh.page(1999)
    env.reset(seed=7)
    assert env.page(1999) == known
    assert shown[1999][0].content == env._render_page(1999)
    assert late == [fresh.page(k) for k in numbers]


def test_full_style_can_be_read() -> None:
    env = archive(pages=4, style="full")
    texts, total = play_expert(env, 0)
    assert total == 1.0
    assert (
        "4 pages" in texts[0] and "note NAME PLACE" in texts[0] and "answer NAME PLACE" in texts[0]
    )
    assert texts[2].startswith("Page 1 of 4\n") and len(texts[2].splitlines()) == 3
    starred = next(text for text in texts if "\n* " in text)
    assert any(kind in starred for kind in ("* def ", "* class "))


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"pages": 0}, "pages"),
        ({"pages": 2.5}, "pages"),
        ({"tokens": 10}, "tokens"),
        ({"tokens": 100, "style": "full"}, "tokens"),
        ({"pages": 4, "tokens": 512}, "pages or tokens"),
        ({"records_per_page": 0}, "records_per_page"),
        ({"records_per_page": 15}, "records_per_page"),
        ({"style": "long"}, "style"),
        ({"names": 3}, "names"),
        ({"names": 5000}, "names=5000"),
        ({"sources": 5000}, "sources=5000"),
        ({"min_sources": 9}, "min_sources"),
        ({"text": "/no/such/folder"}, "/no/such/folder"),
    ],
)
def test_bad_arguments_are_one_line_naming_the_field(kwargs: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as error:
        archive(**kwargs)
    assert named in str(error.value)
    assert "\n" not in str(error.value)
