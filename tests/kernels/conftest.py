"""What the tests of this folder share."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter makes a loop bound of an array of one number, which NumPy 2.4 refuses."""
    from triton.runtime import interpreter  # after the test module has set the interpreter up

    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
