"""The command line: one line and exit code 2 for a user's mistake, 130 for Ctrl-C."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from farhorizon.configs.errors import RunFailed, UnknownArgument, UserError
from farhorizon.envs import make
from farhorizon.launch import cli


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nosuch"], "config nosuch: no such file or train preset"),
        (["train", "nosuch.yaml", "learner.lrr=1"], "config nosuch.yaml"),
        (["eval", "nosuch", "episods=3"], "unknown key episods on the command line; did you mean"),
        (["play", "echo-v0", "sed=3"], "unknown key sed on the command line; did you mean seed?"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("farhorizon: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    "arguments", [["--policy", "/nosuch", "seed=1", "context=8"], ["seed=1", "--policy", "/nosuch"]]
)
def test_settings_may_stand_behind_options(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["play", "echo-v0", *arguments]) == 2
    assert capsys.readouterr().err == "farhorizon: /nosuch: no such folder\n"


@pytest.mark.parametrize(
    "arguments", [["doctor", "x=1"], ["play", "echo-v0", "--polcy=x"], ["play", "a", "b=1", "--x"]]
)
def test_what_is_no_setting_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err


def test_ctrl_c_gives_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(cli._COMMANDS, "doctor", interrupted)
    assert cli.main(["doctor"]) == 130


@pytest.mark.parametrize(("error", "code"), [(UserError("no"), 2), (RunFailed("no"), 1)])
def test_a_mistake_gives_2_and_a_failure_1(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
) -> None:
    def failing(arguments: object) -> int:
        raise error

    monkeypatch.setitem(cli._COMMANDS, "doctor", failing)
    assert cli.main(["doctor"]) == code
    assert capsys.readouterr().err == "farhorizon: no\n"


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        (["env.id=x"], "; quickstart gives it to its own environment: add 'env.kwargs={}'"),
        (["env.id=x", "env.kwargs.pages=2"], ""),
        (["env.kwargs={pages: 2}"], ""),
    ],
)
def test_an_argument_of_a_preset_is_told_apart_from_a_given_one(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    hint: str,
) -> None:
    def failing(arguments: object) -> int:
        make("echo-v0", pages=2)
        return 0

    monkeypatch.setitem(cli._COMMANDS, "train", failing)
    assert cli.main(["train", "quickstart", *overrides]) == 2
    text = f"farhorizon: env.kwargs of 'echo-v0': unknown argument 'pages'; it takes turns{hint}\n"
    assert capsys.readouterr().err == text
    error = pickle.loads(pickle.dumps(UnknownArgument("no", "pages")))  # as an actor's comes home
    assert (str(error), error.name) == ("no", "pages")


def test_a_process_that_ended_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ray.exceptions import NodeDiedError

    def failing(arguments: object) -> int:
        raise NodeDiedError("The node died\nThe worker was killed")

    monkeypatch.setitem(cli._COMMANDS, "doctor", failing)
    assert cli.main(["doctor"]) == 1
    text = capsys.readouterr().err
    assert text.startswith("farhorizon: a process of the run ended while it worked (")
    assert "The worker was killed" in text and text.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(28, "No space left on device"), "output: cannot be read or written: No space"),
        (NotADirectoryError(20, "Not a directory", "/a/b"), "/a/b: cannot be read or written: Not"),
    ],
)
def test_a_disk_that_fails_is_one_line(
    error: OSError, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setitem(cli._COMMANDS, "doctor", fail)
    assert cli.main(["doctor"]) == 1
    found = capsys.readouterr().err
    assert found.startswith(f"farhorizon: {line}") and found.count("\n") == 1


def test_unknown_errors_keep_their_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(arguments: object) -> int:
        raise ZeroDivisionError("a bug")

    monkeypatch.setitem(cli._COMMANDS, "doctor", broken)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        cli.main(["doctor"])


@pytest.mark.parametrize("turns", [1, 2000])  # less and more than what is written at once
def test_output_that_nobody_reads_leaves_no_trace(turns: int) -> None:
    arguments = ["play", "echo-v0", f"env.kwargs.turns={turns}", "rollout.max_turns=2000"]
    command = [sys.executable, "-m", "farhorizon.launch.cli", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as played:
        assert played.stdout is not None and played.stderr is not None
        played.stdout.close()
        assert (played.stderr.read(), played.wait()) == (b"", 141)


def test_help_names_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for name in ("stage", "sft", "train", "eval", "play", "bench", "plan", "doctor"):
        assert f"    {name} " in text
