"""The two exceptions that one line can explain: a mistake in the input, a run that failed."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(ValueError):
    """A mistake in what the user gave: one line that names the field or file and the way out.

    The command line prints it without a stack trace and exits with code 2.
    """


class UnknownArgument(UserError):
    """An environment does not take one of the arguments in env.kwargs: ``name`` says which."""

    def __init__(self, text: str, name: str = "") -> None:
        super().__init__(text)
        self.name = name


@contextmanager
def foreign_code(what: str) -> Iterator[None]:
    """Around code that the user brought: what it raises becomes a `UserError` with its place."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(f"{type(error).__name__}: {error}".split())
        place = f"{Path(frame.filename).name}, line {frame.lineno}"
        raise UserError(f"{what} failed with {text} ({place})") from error


def last_line(error: BaseException) -> str:
    """Where the text of an error from another process says what it was."""
    return next(iter(str(error).strip().splitlines()[::-1]), type(error).__name__).strip()[:300]


class RunFailed(RuntimeError):
    """A run that cannot go on, for a reason that came up while it worked.

    The command line prints it without a stack trace and exits with code 1.
    """
