"""The two exceptions that one line can explain: a mistake in the input, a run that failed."""

from __future__ import annotations

import errno
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

# What a disk says that takes nothing more; a write has no file name with it.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})

_INSTALLED = sysconfig.get_path("purelib"), sysconfig.get_path("platlib")
_STANDARD = sysconfig.get_path("stdlib"), "<"  # "<": modules that are frozen, code from a text
_PACKAGE = __name__.split(".")[0]


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
    """Around code that the user brought: what it raises becomes a `RunFailed` with its place."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        place = place_of(traceback.walk_tb(error.__traceback__))
        raise RunFailed(f"{what} failed with {text}{place}") from error


def place_of(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The innermost line of the user's own code, as `` (my_envs.py, line 5)``; "" without one.

    ``frames`` come with their lines, outermost first. An environment may be installed: lines of
    packages count where there are no others.
    """
    own = foreign = ""
    for frame, line in frames:
        if str(frame.f_globals.get("__name__")).split(".")[0] == _PACKAGE:
            continue
        file = frame.f_code.co_filename
        place = f" ({Path(file).name}, line {line})"
        if file.startswith(_INSTALLED):
            foreign = place
        elif not file.startswith(_STANDARD):
            own = place
    return own or foreign


def last_line(error: BaseException) -> str:
    """Where the text of an error from another process says what it was."""
    return next(iter(str(error).strip().splitlines()[::-1]), type(error).__name__).strip()[:300]


@contextmanager
def written(place: str | Path) -> Iterator[None]:
    """Around what is written there: a full or failing disk becomes a `RunFailed`."""
    try:
        yield
    except OSError as error:
        raise RunFailed(f"{place}: cannot be written: {last_line(error)}") from None


class RunFailed(RuntimeError):
    """A run that cannot go on, for a reason that came up while it worked.

    The command line prints it without a stack trace and exits with code 1.
    """
