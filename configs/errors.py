"""The one exception that means: the user can fix this."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in what the user gave: one line that names the field or file and the way out.

    The command line prints it without a stack trace and exits with code 2.
    """
