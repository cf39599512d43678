"""Code of the user's own is looked at before anything starts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NoReturn

import pytest

from farhorizon.configs.errors import UserError
from farhorizon.configs.schema import EnvConfig, TrainConfig
from farhorizon.launch import train


@pytest.mark.parametrize(
    ("id", "plugin", "said"),
    [
        ("no_such_envs:Counter", "no_such_envs", "ModuleNotFoundError: No module named 'no_such"),
        ("wanting_envs:Own", "wanting_envs.py", "ModuleNotFoundError: No module named 'no_such_"),
        ("own_envs:Ownn", "own_envs.py", "no attribute 'Ownn'.*did you mean 'Own'"),
    ],
)
def test_a_misspelt_module_or_class_is_refused_before_an_actor_starts(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    id: str,
    plugin: str,
    said: str,
) -> None:
    """C23: within 30 s, in one line with the error of the import."""
    own = "from farhorizon.envs.echo import Echo\nclass Own(Echo): pass\n"
    (tmp_path / "own_envs.py").write_text(own)
    (tmp_path / "wanting_envs.py").write_text("import no_such_library\n")
    monkeypatch.chdir(tmp_path)

    def started(*_: object) -> NoReturn:
        raise AssertionError("an actor could start")

    for name in ("cluster", "RolloutPool", "LearnerGroup"):
        monkeypatch.setattr(train, name, started)
    env = EnvConfig(id=id, plugins=(plugin,))
    output = tmp_path / "run"
    config = TrainConfig(policy=str(checkpoint), output=str(output), context=64, env=env)
    start = time.monotonic()
    with pytest.raises(UserError, match=said) as caught:
        train.train(config)
    assert time.monotonic() - start < 30
    assert "\n" not in str(caught.value) and not output.exists()
