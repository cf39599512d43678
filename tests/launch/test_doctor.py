"""What `farhorizon doctor` tells to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from farhorizon.launch import doctor

PINS = Path(__file__).parents[2] / "launch" / "constraints.txt"


def test_a_missing_package_is_a_problem_with_a_way_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ("torch", "no-such-package"))
    monkeypatch.setattr(doctor, "_check_ray", list)
    assert doctor.doctor() == 1
    problems = [line for line in capsys.readouterr().out.splitlines() if "problem " in line]
    said = "no-such-package is not installed: install the version in launch/constraints.txt"
    assert problems[0].split(maxsplit=1)[1] == said
    assert not any("torch" in line for line in problems)


def test_the_named_file_has_the_version_of_every_package() -> None:
    pinned = re.findall(r"^([a-z-]+)==", PINS.read_text(encoding="utf-8"), re.MULTILINE)
    assert {*doctor.PACKAGES} - {*pinned} == {"farhorizon"}
