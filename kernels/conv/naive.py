"""The short convolution in plain torch: one shifted product for each tap."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def naive_short_conv(
    x: torch.Tensor, kernel: torch.Tensor, bounds: tuple[int, ...], tail: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`farhorizon.kernels.conv.short_conv` in x's dtype, any float type, on any device."""
    tokens, channels = x.shape
    count, history = len(bounds) - 1, kernel.shape[1] - 1
    kernel = kernel.to(x.dtype)
    if tail is None:
        tail = x.new_zeros(count, history, channels)
    length = tokens // count
    if length > 0 and bounds == tuple(range(0, tokens + 1, length)):
        window = torch.cat([tail.to(x.dtype), x.view(count, length, channels)], 1)
        out = window[:, :length] * kernel[:, 0]
        for i in range(1, history + 1):
            out = torch.addcmul(out, window[:, i : i + length], kernel[:, i])
        return F.silu(out.flatten(0, 1)), window[:, length:]
    # each sequence behind its tail, all in one row
    edges = torch.tensor(bounds, device=x.device)
    number = torch.arange(count, device=x.device)
    row = torch.repeat_interleave(number, edges.diff(), output_size=tokens)
    place = torch.arange(tokens, device=x.device) + history * (row + 1)
    before = torch.arange(count * history, device=x.device)
    before = before + edges[:-1].repeat_interleave(history)
    window = x.new_zeros(tokens + count * history, channels)
    window = window.index_copy(0, place, x).index_copy(0, before, tail.to(x.dtype).flatten(0, 1))
    length = len(window) - history
    out = window[:length] * kernel[:, 0]
    for i in range(1, history + 1):
        out = torch.addcmul(out, window[i : i + length], kernel[:, i])
    last = (edges[1:] + history * number)[:, None] + torch.arange(history, device=x.device)
    return F.silu(out.index_select(0, place - history)), window[last]
