"""Counter-based sampling: what is drawn depends on (run seed, task, sibling, position) alone."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from ..configs.errors import RunFailed
from ..policy.decode import draw_tokens, stream_points


def stream_key(seed: int, task_id: str, sibling: int) -> int:
    """Key of one trajectory's random stream, in [0, 2**64), equal in every process."""
    text = f"{seed}\0{sibling}\0{task_id}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) per (key, position): splitmix64 output number ``position`` of ``key``.

    ``keys`` uint64 [N], ``positions`` int64 [N] >= 0; returns fp64 [N] with 53 random bits.
    """
    streams, numbers = torch.from_numpy(keys.view(np.int64)), torch.from_numpy(positions)
    return stream_points(streams, numbers).numpy()


def sample(
    logits: Tensor, temperature: float | np.ndarray, keys: np.ndarray, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One token per row by inverse CDF in fp64, with its log-prob at that temperature.

    ``logits`` [N, V] on any device, ``temperature`` one number or fp64 [N], ``keys`` uint64 [N],
    ``positions`` int64 [N]: index of the new token in its trajectory. Temperature 0 takes the
    most likely token and reports its log-prob at temperature 1. Returns int64 [N], fp32 [N];
    raises RunFailed if a row's logits are not finite.
    """
    heat = np.broadcast_to(np.asarray(temperature, np.float64), len(logits))
    given = torch.from_numpy(np.stack((heat, uniforms(keys, positions)))).to(logits.device)
    return checked(draw_tokens(logits, *given).cpu().numpy())


def checked(drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int64 [N] and log-probs fp32 [N] of fp64 [N, 2], where token ids are exact; RunFailed
    if any is not finite."""
    if not np.isfinite(drawn).all():
        row = int(np.flatnonzero(~np.isfinite(drawn).all(-1))[0])
        raise RunFailed(
            f"rollout: logits of row {row} are not finite: the weights of this policy have grown "
            "too large; go on from an earlier checkpoint, with a lower lr"
        )
    return drawn[:, 0].astype(np.int64), drawn[:, 1].astype(np.float32)
