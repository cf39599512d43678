"""The digest of a tensor's bytes: its specification, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

ALIGNED = 16  # bytes: where copies begin
CHUNK = 1 << 14  # words that stay in the cache of a core
# Of each lane: what a place adds, and two bijections of 64 bits as shift, factor, shift, factor,
# shift: splitmix64 (Steele, Lea and Flood 2014) and the finaliser of MurmurHash3 (Appleby 2011).
STEPS = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)
MIXERS = (
    (30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31),
    (33, 0xFF51AFD7ED558CCD, 33, 0xC4CEB9FE1A85EC53, 33),
)
LENGTH = 0x5851F42D4C957F2D  # keeps lengths apart from words


def naive_lanes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """As `farhorizon.kernels.digest.lanes`, for tensors of a CPU: word ``i`` of the bytes, eight of
    them with the lowest first and zeros behind the last, adds ``mix(word + (i + 1) step)`` to each
    lane, and the number of bytes ``mix(bytes xor LENGTH)``, all modulo 2^64."""
    parts = [(n, *part) for n, tensor in enumerate(tensors) for part in _parts(tensor)]
    threads = torch.get_num_threads()
    if threads == 1 or len(parts) < 2:
        sums = [_sums(words, first) for _, words, first in parts]
    else:  # NumPy lets go of the interpreter
        with ThreadPoolExecutor(threads) as pool:
            sums = list(pool.map(_sums, *zip(*((w, first) for _, w, first in parts), strict=True)))
    out = np.zeros((len(tensors), 2), np.uint64)
    for lane in range(2):
        sizes = np.array([t.numel() * t.element_size() for t in tensors], np.uint64)
        out[:, lane] = _mixed(sizes ^ np.uint64(LENGTH), lane)
    for (number, *_), pair in zip(parts, sums, strict=True):
        out[number] += pair
    return torch.from_numpy(out.view(np.int64))


def naive_copied_lanes(
    tensors: Sequence[torch.Tensor], starts: Sequence[int], payload: torch.Tensor
) -> torch.Tensor:
    """As `farhorizon.kernels.digest.copied_lanes`, for tensors of a CPU."""
    copies: list[torch.Tensor] = []
    for tensor, start in zip(tensors, starts, strict=True):
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        end = start + len(data)
        payload[start:end] = data
        payload[end : end + -len(data) % ALIGNED] = 0
        copies.append(payload[start:end])
    return naive_lanes(copies)


def _parts(tensor: torch.Tensor) -> list[tuple[np.ndarray, int]]:
    """The words of a tensor in chunks, uint64, each with the index of its first word."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    whole = len(data) // 8 * 8
    # A start that is no multiple of 8 is fine for NumPy on all that torch runs on.
    words = data[:whole].view(np.uint64)
    parts = [(words[first : first + CHUNK], first) for first in range(0, len(words), CHUNK)]
    if whole < len(data):
        tail = np.zeros(8, np.uint8)
        tail[: len(data) - whole] = data[whole:]
        parts.append((tail.view(np.uint64), len(words)))
    return parts


def _sums(words: np.ndarray, first: int) -> np.ndarray:
    """What some words add to both lanes, uint64 [2]."""
    place = np.arange(first + 1, first + 1 + len(words), dtype=np.uint64)
    sums = np.empty(2, np.uint64)
    for lane, step in enumerate(STEPS):
        sums[lane] = _mixed(words + place * np.uint64(step), lane).sum(dtype=np.uint64)
    return sums


def _mixed(x: np.ndarray, lane: int) -> np.ndarray:
    """The bijection of a lane; writes to ``x``."""
    first, factor, second, other, last = map(np.uint64, MIXERS[lane])
    x ^= x >> first
    x *= factor
    x ^= x >> second
    x *= other
    x ^= x >> last
    return x
