"""The digest on a GPU: the number that a CPU gives, at sizes that tests in the interpreter lack."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from farhorizon.kernels.digest import copied_lanes, digests, lanes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int8])
def test_large_tensors_have_the_digest_of_a_cpu(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes = (0, 1, 7, 8191, 8 * 8192, 8 * 8192 + 1, 3_000_001)
    tensors = [(torch.randn(n) * 50).to(kind) for n in sizes]
    assert digests([t.cuda() for t in tensors]) == digests(tensors)


@pytest.mark.parametrize("late", [0, 1, 2, 5, 8, 13])
def test_any_start(late: int) -> None:
    data = torch.randint(0, 256, (1_000_000,), dtype=torch.uint8)
    for end in (999_000, 999_001, 999_990, 1_000_000):
        assert digests([data.cuda()[late:end]]) == digests([data[late:end]])


def test_one_bit_anywhere_shows() -> None:
    data = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device="cuda")
    (before,) = lanes([data])
    for at in (0, 1, 65535, 65536, 524_288, (1 << 20) - 1):
        data[at] ^= 128
        (after,) = lanes([data])
        assert (before != after).all()
        data[at] ^= 128
    assert torch.equal(lanes([data])[0], before)


def test_the_end_of_the_memory_is_not_passed() -> None:
    """Tensors that end where an allocation ends, in the middle of a word."""
    for size in (2 << 20, (20 << 20) + 512):
        data = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
        for start in (1, 3, size - 5):
            assert digests([data[start:]]) == digests([data[start:].cpu()])
    torch.cuda.synchronize()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int8])
def test_large_tensors_are_copied_on_the_way(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes = (0, 1, 7, 8191, 8 * 8192, 8 * 8192 + 1, 3_000_001)
    tensors = [(torch.randn(n) * 50).to(kind) for n in sizes]
    room = [-(-t.numel() * t.element_size() // 16) * 16 for t in tensors]
    starts = [sum(room[:n]) for n in range(len(room))]
    payloads = [torch.full((sum(room),), 7, dtype=torch.uint8, device=d) for d in ("cpu", "cuda")]
    theirs = copied_lanes(tensors, starts, payloads[0])
    own = copied_lanes([t.cuda() for t in tensors], starts, payloads[1])
    assert torch.equal(own.cpu(), theirs)
    assert torch.equal(payloads[1].cpu(), payloads[0])


def test_it_copies_at_the_speed_of_the_memory() -> None:
    """A gigabyte, digested on the way: at least 60 % as fast as a plain copy."""
    data = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_(0, 256)
    other = torch.empty_like(data)
    fused, plain = (
        milliseconds(call)
        for call in (lambda: copied_lanes([data], [0], other), lambda: other.copy_(data))
    )
    print(f"copy with digest {fused:.3f} ms, plain {plain:.3f} ms")
    assert plain > 0.6 * fused


def test_it_reads_at_the_speed_of_the_memory() -> None:
    """Of a gigabyte: more than half as fast as a copy, which moves twice as much."""
    data = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_(0, 256)
    other = torch.empty_like(data)
    own, copy = map(milliseconds, (lambda: lanes([data]), lambda: other.copy_(data)))
    print(f"digest {own:.3f} ms, copy {copy:.3f} ms")
    assert own < 2 * copy


def milliseconds(call: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        call()
    begin.record()
    for _ in range(10):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 10
