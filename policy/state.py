"""What a policy remembers of each sequence between forwards: KDA states and latent caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..kernels.kda import ReplayState
from .config import PolicyConfig


@dataclass(slots=True)
class KdaState:
    """``recurrent`` fp32 or wider [N, H, K, V] and ``conv`` [N, W - 1, 3 H K], the last inputs of
    the short convolutions of q, k and v."""

    recurrent: torch.Tensor
    conv: torch.Tensor

    def select(self, index: torch.Tensor) -> KdaState:
        return KdaState(self.recurrent.index_select(0, index), self.conv.index_select(0, index))

    def put(self, index: torch.Tensor, other: KdaState) -> None:
        self.recurrent.index_copy_(0, index, other.recurrent)
        self.conv.index_copy_(0, index, other.conv)

    lend, take_back = select, put

    @staticmethod
    def cat(parts: Sequence[KdaState]) -> KdaState:
        return KdaState(torch.cat([p.recurrent for p in parts]), torch.cat([p.conv for p in parts]))

    def tensors(self) -> list[torch.Tensor]:
        return [self.recurrent, self.conv]


@dataclass(slots=True)
class ReplayedKda:
    """As `KdaState`, for decoding with the sums of the chunked form (`ReplayState`)."""

    replay: ReplayState
    conv: torch.Tensor

    def select(self, index: torch.Tensor) -> ReplayedKda:
        return ReplayedKda(self.replay.select(index), self.conv.index_select(0, index))

    def put(self, index: torch.Tensor, other: ReplayedKda) -> None:
        self.replay.put(index, other.replay)
        self.conv.index_copy_(0, index, other.conv)

    lend, take_back = select, put

    @staticmethod
    def cat(parts: Sequence[ReplayedKda]) -> ReplayedKda:
        replay = ReplayState.cat([p.replay for p in parts])
        return ReplayedKda(replay, torch.cat([p.conv for p in parts]))

    def tensors(self) -> list[torch.Tensor]:
        return [*self.replay.tensors(), self.conv]


@dataclass(slots=True)
class LatentCache:
    """``latent`` [N, capacity, kv_lora_rank + rope]: normed latent and shared key per token.

    ``rows`` are set in a part that shares the tensor of a larger cache: sequence n of the part
    lies in row ``rows[n]``.
    """

    latent: torch.Tensor
    rows: tuple[int, ...] | None = None

    def store(self, row: torch.Tensor, position: torch.Tensor, entry: torch.Tensor) -> None:
        """Write ``entry`` [T, width] to ``position`` [T] of the sequences ``row`` [T]."""
        if self.rows is not None:
            row = torch.tensor(self.rows, device=row.device)[row]
        self.latent[row, position] = entry.to(self.latent.dtype)

    def keys(self, length: int) -> list[torch.Tensor]:
        """The first ``length`` tokens of all sequences in their order: one view ``[n, length,
        width]`` for each stretch of rows that lie side by side."""
        keys = self.latent[:, :length]
        if self.rows is None:
            return [keys]
        edges = [i for i in range(1, len(self.rows)) if self.rows[i] != self.rows[i - 1] + 1]
        starts, ends = [0, *edges], [*edges, len(self.rows)]
        return [
            keys[self.rows[a] : self.rows[b - 1] + 1] for a, b in zip(starts, ends, strict=True)
        ]

    def reserve(self, length: int) -> None:
        """Grow by doubling until ``length`` tokens fit."""
        count, capacity, width = self.latent.shape
        if length > capacity:
            wider = self.latent.new_zeros(count, max(length, 2 * capacity, 16), width)
            wider[:, :capacity] = self.latent
            self.latent = wider

    def select(self, index: torch.Tensor) -> LatentCache:
        return LatentCache(self.latent.index_select(0, index))

    def put(self, index: torch.Tensor, other: LatentCache) -> None:
        self.reserve(other.latent.shape[1])
        self.latent[index, : other.latent.shape[1]] = other.latent

    def lend(self, index: torch.Tensor) -> LatentCache:
        return LatentCache(self.latent, tuple(index.tolist()))

    def take_back(self, index: torch.Tensor, part: LatentCache) -> None:
        self.latent = part.latent  # another one if it had to grow

    @staticmethod
    def cat(parts: Sequence[LatentCache]) -> LatentCache:
        capacity = max(p.latent.shape[1] for p in parts)
        for p in parts:
            p.reserve(capacity)
        return LatentCache(torch.cat([p.latent[:, :capacity] for p in parts]))

    def tensors(self) -> list[torch.Tensor]:
        return [self.latent]


LayerState = KdaState | ReplayedKda | LatentCache


@dataclass(slots=True)
class LayerStep:
    """A layer's state for one token of sequences that are anywhere in it: sequence n of the step is
    row ``places[n]`` of ``kept``, below 0 none. It is changed where it lies, at any time of the
    device's: nothing of it is read on the host, nothing is moved."""

    kept: LayerState
    places: torch.Tensor
    lengths: torch.Tensor


class PlacedState:
    """What a step of one token reads of a `DecodeState`, and how it is changed by it.

    ``places`` int32 [B] are rows of it, ``past`` int32 [B] their numbers of tokens so far; the
    state's own ``lengths`` stay as they are.
    """

    def __init__(self, state: DecodeState, places: torch.Tensor, past: torch.Tensor) -> None:
        after = past + 1
        self.layers = [LayerStep(layer, places, after) for layer in state.layers]
        self.lengths = past


class DecodeState:
    """Recurrent state, convolution tails and latent cache of N sequences.

    Updated in place by `Policy.forward`; grows with the tokens stored, never with a limit.
    ``lengths`` int64 [N] counts the tokens each sequence has seen.
    """

    def __init__(self, layers: list[LayerState], lengths: torch.Tensor) -> None:
        self.layers = layers
        self.lengths = lengths

    @classmethod
    def empty(
        cls,
        config: PolicyConfig,
        num_sequences: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        matched: bool = False,
    ) -> DecodeState:
        """The state before any token; ``dtype`` is that of conv tails and latents.

        ``matched``: KDA layers decode with the sums of the chunked form that training runs, and
        not with the recurrent one. ``dtype`` must then be that of the activations, and no gradient
        flows through these layers.
        """
        linear = config.linear_attn_config or {}
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        heads, width = linear["num_heads"], linear["head_dim"]
        layers: list[LayerState] = []
        for i in range(config.num_hidden_layers):
            if config.is_mla(i):
                size = config.kv_lora_rank + config.qk_rope_head_dim
                layers.append(
                    LatentCache(torch.zeros(num_sequences, 0, size, device=device, dtype=dtype))
                )
            else:
                recurrent = torch.zeros(
                    num_sequences, heads, width, width, device=device, dtype=wide
                )
                tail = linear["short_conv_kernel_size"] - 1
                conv = torch.zeros(
                    num_sequences, tail, 3 * heads * width, device=device, dtype=dtype
                )
                if matched:
                    bound = config.gate_lower_bound
                    replay = ReplayState.start(recurrent, dtype=dtype, lower_bound=bound)
                    layers.append(ReplayedKda(replay, conv))
                else:
                    layers.append(KdaState(recurrent, conv))
        return cls(layers, torch.zeros(num_sequences, dtype=torch.long, device=device))

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes held by all tensors."""
        return sum(t.nbytes for layer in self.layers for t in layer.tensors())

    def reserve(self, length: int) -> None:
        """Make room for ``length`` tokens of every sequence."""
        for layer in self.layers:
            if isinstance(layer, LatentCache):
                layer.reserve(length)

    def select(self, index: torch.Tensor) -> DecodeState:
        """A copy of the rows ``index`` [M]; repeated rows fork a sequence."""
        return DecodeState(
            [layer.select(index) for layer in self.layers], self.lengths.index_select(0, index)
        )

    def put(self, index: torch.Tensor, other: DecodeState) -> None:
        """Overwrite the rows ``index`` with those of ``other``."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.put(index, theirs)  # type: ignore[arg-type]
        self.lengths = self.lengths.index_copy(0, index, other.lengths)

    def lend(self, index: torch.Tensor) -> DecodeState:
        """The rows ``index`` for one forward, to be given to `take_back` after it.

        Latents are shared, for a copy of all tokens would cost more than the forward; KDA states
        are copied.
        """
        return DecodeState(
            [layer.lend(index) for layer in self.layers], self.lengths.index_select(0, index)
        )

    def take_back(self, index: torch.Tensor, part: DecodeState) -> None:
        """Take over what a forward made of the rows that were lent."""
        for mine, theirs in zip(self.layers, part.layers, strict=True):
            mine.take_back(index, theirs)  # type: ignore[arg-type]
        self.lengths = self.lengths.index_copy(0, index, part.lengths)

    @classmethod
    def cat(cls, parts: Sequence[DecodeState]) -> DecodeState:
        """The rows of several states, in order."""
        layers = [
            type(column[0]).cat(column)  # type: ignore[arg-type]
            for column in zip(*(p.layers for p in parts), strict=True)
        ]
        return cls(layers, torch.cat([p.lengths for p in parts]))
