"""What did not fit into a GPU's memory, in words; and what others may have of it."""

from __future__ import annotations

import linecache
import re
import traceback
from pathlib import Path

import torch
from torch import nn

_PACKAGE = __name__.split(".")[0]
_SIZE = re.compile(r"Tried to allocate ([\d.]+ \w+)")


def free_cached(share: float) -> None:
    """Give back what torch keeps for later, on a GPU of which this process has a ``share`` alone:
    no other process can take it."""
    if 0 < share < 1:
        torch.cuda.empty_cache()


def lack(error: torch.OutOfMemoryError, policy: nn.Module | None = None) -> str:
    """How large the tensor was that did not fit, the module of ``policy``, where there is one, and
    the line of ours that wanted it, and what was in use."""
    found = _SIZE.search(str(error))
    size = found[1] if found else "a tensor"
    modules = () if policy is None else policy.named_modules()
    names = {id(module): name for name, module in modules}
    module, line = "", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).split(".")[0] != _PACKAGE:
            continue
        module = names.get(id(frame.f_locals.get("self")), "") or module
        file = frame.f_code.co_filename
        text = linecache.getline(file, number).strip()
        line = f" ({Path(file).parent.name}/{Path(file).name}, line {number}: {text})"
    used = ""
    if torch.cuda.is_available():
        used = f" beside {torch.cuda.memory_allocated() / 2**30:.1f} GiB in use"
    where = f" in {module}" if module else ""
    return f"the GPU's memory does not suffice for {size}{where}{line}{used}"
