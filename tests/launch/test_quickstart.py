"""The quickstart script: what each phase is given, and what a second call leaves alone."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "launch" / "quickstart.sh"
# Says what it is asked for and leaves what the command would, as far as the script looks at it.
COMMAND = """#!/usr/bin/env bash
echo "farhorizon $*"
[[ "$*" != *fail=true* ]] || exit 3
for argument; do
    case "$argument" in output=*) folder="${argument#*=}" ;; seed=*) seed="${argument#*=}" ;; esac
done
mkdir -p "$folder"
echo "seed: $seed" >"$folder/config.yaml"
touch "$folder/stage.json"
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The script beside a set-up that offers a command which only writes down its calls."""
    launch = tmp_path / "launch"
    launch.mkdir()
    command = launch / "farhorizon"
    command.write_text(COMMAND)
    command.chmod(0o755)
    (launch / "setup.sh").write_text(f'ROOT="{tmp_path}"\nPATH="{launch}:$PATH"\n')
    return Path(shutil.copy(SCRIPT, launch))


def call(script: Path, *arguments: str, active: str = "/env") -> tuple[int, list[str], str]:
    """Exit code, lines of the output but for the last one with its times, error text; in the
    ``active`` environment."""
    done = subprocess.run(
        ["bash", str(script), *arguments],
        capture_output=True,
        text=True,
        cwd=script.parents[1],
        env={"PATH": os.environ["PATH"], "VIRTUAL_ENV": active},
    )
    lines = done.stdout.splitlines()
    return done.returncode, lines[:-1] if done.returncode == 0 else lines, done.stderr


def test_settings_reach_their_phase(script: Path) -> None:
    code, lines, _ = call(script, "output=out", "stage.a=1", "seed=7", "sft.b=2 3", "steps=4")
    out = script.parents[1] / "out"
    assert code == 0 and lines == [
        "== stage",
        f"farhorizon stage quickstart output={out}/stage seed=7 a=1",
        "== sft",
        f"farhorizon sft quickstart policy={out}/stage output={out}/sft seed=7 b=2 3",
        "== train",
        f"farhorizon train quickstart policy={out}/sft output={out}/train seed=7 steps=4",
    ]


def test_what_is_complete_is_told_and_not_repeated(script: Path) -> None:
    out = script.parents[1] / "out"
    assert call(script, f"output={out}")[0] == 0
    (out / "sft" / "stage.json").unlink()
    code, lines, _ = call(script, f"output={out}", "stage.text=other")
    assert code == 0 and lines == [
        f"== stage: complete in {out}/stage, not repeated; without effect: text=other",
        "== sft",
        f"farhorizon sft quickstart policy={out}/stage output={out}/sft seed=0",
        "== train",
        f"farhorizon train quickstart policy={out}/sft output={out}/train seed=0",
    ]
    _, lines, _ = call(script, f"output={out}")
    assert lines[1] == f"== sft: complete in {out}/sft, not repeated"


def test_a_shell_without_the_environment_is_told_how_to_activate_it(script: Path) -> None:
    line = f"quickstart: before those commands: . {script.parents[1]}/.venv/bin/activate"
    assert call(script, active="")[1][-1] == line
    code, _, error = call(script, "fail=true", active="")
    assert code == 3 and line in error


def test_a_phase_of_another_seed_is_refused(script: Path) -> None:
    """Its result would pass for one of the seed that was asked for."""
    out = script.parents[1] / "out"
    assert call(script, f"output={out}")[0] == 0
    code, lines, error = call(script, f"output={out}", "seed=1")
    assert (code, lines) == (2, [])
    assert error == (
        f"quickstart: {out}/stage was made with seed=0, not seed=1; choose another output\n"
    )
    (out / "stage" / "config.yaml").unlink()
    assert "was made with seed=unknown, not seed=0" in call(script, f"output={out}")[2]


def test_a_phase_that_fails_ends_it(script: Path) -> None:
    code, lines, error = call(script, "output=out", "sft.fail=true")
    assert code == 3 and lines[-1].startswith("farhorizon sft")
    assert "quickstart: sft failed (exit code 3); times: stage" in error
    assert call(script, "stray")[0] == 2
