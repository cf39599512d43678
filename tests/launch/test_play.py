"""Episodes on the screen, sampled text marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from farhorizon.configs.errors import RunFailed, UserError
from farhorizon.configs.schema import EnvConfig, PlayConfig, RolloutConfig
from farhorizon.envs import check_env, register, registry
from farhorizon.envs.echo import Echo
from farhorizon.launch.fresh import expert_env
from farhorizon.launch.play import play


def test_expert_episode(capsys: pytest.CaptureFixture[str]) -> None:
    assert play(PlayConfig(env=EnvConfig(id="echo-v0", kwargs={"turns": 2}))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[0] for line in lines[2:6]] == [" ", ">", " ", ">"]
    assert lines[2].split()[-1] == lines[3].split()[-1]
    assert lines[6:] == ["reward 1  success True  turns 2"]


def test_policy_episode(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = PlayConfig(
        env=EnvConfig(id="echo-v0"),
        policy=str(checkpoint),
        rollout=RolloutConfig(max_turn_tokens=3),
    )
    assert play(config) == 0
    text = capsys.readouterr().out
    assert "\n  <|open|>user<|sep|> " in text
    assert "\n> " in text
    assert "stop terminated" in text
    assert play(config) == 0
    assert capsys.readouterr().out == text


def test_environment_without_expert() -> None:
    fakes = Path(__file__).parents[1] / "fakes.py"
    with pytest.raises(UserError, match="has no expert: add policy=FOLDER"):
        play(PlayConfig(env=EnvConfig(id="scripted-v0", plugins=(str(fakes),))))


@pytest.mark.parametrize("method", ["reset", "expert", "step"])
def test_an_environment_that_raises_is_one_line_with_its_place(tmp_path: Path, method: str) -> None:
    plugin = tmp_path / f"odd_{method}.py"
    plugin.write_text(
        "from farhorizon.envs import register\n"
        "from farhorizon.envs.echo import Echo\n"
        "class Odd(Echo):\n"
        f"    def {method}(self, *arguments, **keywords):\n"
        "        raise RuntimeError('out of\\nred')\n"
        "register('odd-v0', Odd)\n"
    )
    message = rf"^env: {method} of Odd failed with RuntimeError: out of red \(odd_.*, line 5\)$"
    with pytest.raises(RunFailed, match=message):
        play(PlayConfig(env=EnvConfig(id="odd-v0", plugins=(str(plugin),))))


def test_an_episode_that_fails_under_a_policy_is_shown_and_told(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes = Path(__file__).parents[1] / "fakes.py"
    env = EnvConfig(id="scripted-v0", kwargs={"fail_at": 1}, plugins=(str(fakes),))
    with pytest.raises(RunFailed, match=r"^env: .*the sandbox is gone[^\n]*$"):
        play(PlayConfig(env=env, policy=str(checkpoint)))
    assert "reward none  success False  turns 0  stop error" in capsys.readouterr().out


@pytest.mark.parametrize("threshold", [None, "1", True, float("nan")])
def test_a_threshold_that_is_no_number_is_one_line(threshold: Any) -> None:
    class Odd(Echo):
        success_threshold = threshold

    register("odd-threshold-v0", Odd)
    config = EnvConfig(id="odd-threshold-v0")
    message = r"^environment Odd: success_threshold must be a number, got [^\n]*$"
    for use in (
        lambda: check_env(Odd()),
        lambda: expert_env(config),
        lambda: play(PlayConfig(env=config)),
    ):
        with pytest.raises(UserError, match=message):
            use()
    registry._factories.pop("odd-threshold-v0")
