"""What the documents tell people to type and to open is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from farhorizon.configs import schema
from farhorizon.configs.load import check_overrides, load_config, override_config
from farhorizon.launch import cli
from farhorizon.launch.benchmarks import BENCHMARKS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SCHEMAS = {
    "stage": schema.StageConfig,
    "sft": schema.SftConfig,
    "train": schema.TrainConfig,
    "eval": schema.EvalConfig,
    "serve": schema.ServeConfig,
    "play": schema.PlayConfig,
    "plan": schema.PlanConfig,
}


def commands() -> list[str]:
    """Command lines of code blocks and of code in sentences; words in capitals are gaps there."""
    found: set[str] = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        blocks = re.findall(r"^    (?:taskset -c 0,1 )?farhorizon (.*)$", text, re.MULTILINE)
        found |= {*blocks, *re.findall(r"`farhorizon ([a-z][^`]*)`", text)}
    return sorted({" ".join(re.sub(r"\s#.*", "", line).split()) for line in found})


@pytest.mark.parametrize("line", commands())
def test_commands_are_understood(line: str) -> None:
    name, *words = shlex.split(line)
    if words and words[0].isupper():
        return  # a synopsis
    if not words and name != "doctor":
        assert name in cli._COMMANDS
        return
    arguments = cli._parse([name, *words])
    if name in ("stage", "sft", "train"):
        if "/" not in arguments.config:  # else a file of the reader's
            assert load_config(SCHEMAS[name], arguments.config, arguments.overrides)
    elif name == "bench":
        assert override_config(BENCHMARKS[arguments.name][1](), arguments.overrides)
    elif name != "doctor":
        check_overrides(SCHEMAS[name], arguments.overrides)


def test_the_commands_are_found() -> None:
    assert {line.split()[0] for line in commands()} >= {*cli._COMMANDS} - {"doctor"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_are_there(page: Path) -> None:
    folders = "configs|docs|envs|kernels|launch|policy|rl|rollout|tests"
    paths = re.findall(rf"\b(?:{folders})/[\w./*-]+\.\w+", page.read_text(encoding="utf-8"))
    assert [path for path in paths if not any(ROOT.glob(path))] == []
