"""The two exceptions that one line can explain: a mistake in the input, a run that failed."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in what the user gave: one line that names the field or file and the way out.

    The command line prints it without a stack trace and exits with code 2.
    """


def last_line(error: BaseException) -> str:
    """Where the text of an error from another process says what it was."""
    return next(iter(str(error).strip().splitlines()[::-1]), type(error).__name__).strip()[:300]


class RunFailed(RuntimeError):
    """A run that cannot go on, for a reason that came up while it worked.

    The command line prints it without a stack trace and exits with code 1.
    """
