"""What the tests of this folder share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from farhorizon.rl.engine import join, leave


@pytest.fixture(scope="package")
def only_rank() -> Iterator[None]:
    """This process is the only rank; DeepSpeed remembers its group, so it joins but once."""
    environment = dict(os.environ)  # which says from now on that there are ranks
    join(0, 1, "", "cpu")
    yield
    leave()
    os.environ.clear()
    os.environ.update(environment)
