"""The display without a terminal: plain lines and phase times."""

from __future__ import annotations

import io

from farhorizon.launch.progress import Display


def test_plain_lines_without_a_terminal() -> None:
    stream = io.StringIO()
    with Display(4, done=0, stream=stream) as display:
        with display.phase("rollout"):
            pass
        with display.phase("rollout"):
            pass
        with display.phase("learn"):
            pass
        assert set(display.seconds) == {"rollout", "learn"}
        assert set(display.take_seconds()) == {"rollout", "learn"}
        assert display.take_seconds() == {}
        display.step(1, 30.0, 1234.4, 0.5)
        display.line("[not markup]")
    assert stream.getvalue() == (
        "step 1/4  30.0 s  1,234 tokens/s  success 0.50  left 1:30\n[not markup]\n"
    )
