"""What a caller's rows of tokens mean: where sequences start, and which tokens are padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .packing import Packing


@dataclass(frozen=True, slots=True)
class Layout:
    """The real tokens of ``input_ids [B, L]``, packed; padding is never run.

    ``real`` [T] are the indices of the packed tokens in the flattened ``input_ids``, None when
    every token is real; ``given`` is B * L.
    """

    packing: Packing
    real: torch.Tensor | None
    given: int

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, L]`` -> ``[T]``."""
        return x.flatten() if self.real is None else x.flatten()[self.real]

    def restore(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, D]`` -> ``[B * L, D]``, zeros where padding was."""
        if self.real is None:
            return x
        return x.new_zeros(self.given, x.shape[1]).index_copy(0, self.real, x)


def read_layout(
    input_ids: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    continued: bool = False,
) -> Layout:
    """The layout that the packing names of `Policy.forward` describe.

    ValueError when they contradict each other, on padding that is not at the right end of a row,
    and on any padding of sequences that are ``continued``.
    """
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}, expected [B, L]")
    batch, length = input_ids.shape
    counts = [length] * batch
    real = None
    if attention_mask is not None:
        counts, real = _right_padding(input_ids, attention_mask)
    if real is not None and (continued or cu_seqlens is not None):
        other = "a state" if continued else "cu_seqlens"
        raise ValueError(f"attention_mask hides tokens, which {other} does not allow")
    bounds = tuple(sum(counts[:n]) for n in range(batch + 1))
    if cu_seqlens is not None:
        if batch != 1:
            raise ValueError(f"cu_seqlens needs input_ids [1, T], got batch size {batch}")
        if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
            raise ValueError(
                f"cu_seqlens has shape {list(cu_seqlens.shape)}, expected [N + 1] for N sequences"
            )
        bounds = tuple(cu_seqlens.tolist())
        if bounds[-1] != length:
            raise ValueError(f"cu_seqlens ends at {bounds[-1]}, input_ids has {length} tokens")
    elif position_ids is not None:
        positions = position_ids.expand(batch, length).flatten()
        starts = (positions if real is None else positions[real]) == 0
        restarts = set(starts.nonzero().flatten().tolist()) - set(bounds)
        if restarts and batch != 1:
            raise ValueError(
                f"position_ids restart within a row, which needs input_ids [1, T], got {batch} rows"
            )
        bounds = tuple(sorted(restarts | set(bounds)))
    return Layout(Packing.of(bounds, input_ids.device), real, batch * length)


def _right_padding(
    input_ids: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[list[int], torch.Tensor | None]:
    """Real tokens of each row, and their flattened indices if there is any padding."""
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}, expected that of input_ids, "
            f"{list(input_ids.shape)}"
        )
    mask = attention_mask != 0
    if bool(mask.all()):
        return [mask.shape[1]] * len(mask), None
    if not bool(mask[:, 0].all()):
        raise ValueError("attention_mask hides the first token: left padding is not supported")
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise ValueError("attention_mask has holes: only the right end of a row may be hidden")
    return mask.sum(1).tolist(), mask.flatten().nonzero().flatten()
