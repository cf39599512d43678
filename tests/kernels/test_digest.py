"""The digest of bytes: what it tells apart, in NumPy, by a definition in Python's integers, and in
Triton's interpreter where there is no GPU, else compiled."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are decorated, below
import triton.experimental.gluon  # noqa: E402, F401  # in the same mode: launches look into it

from farhorizon.kernels.digest import (  # noqa: E402
    copied_lanes,
    digests,
    fused,
    lanes,
    naive,
    naive_copied_lanes,
    naive_lanes,
    texts,
)

os.environ.pop("TRITON_INTERPRET", None)

DEVICE = "cuda" if GPU else "cpu"
Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks so small that short tensors have several, and several steps in each."""
    torch.manual_seed(0)
    monkeypatch.setattr(naive, "CHUNK", 5)
    monkeypatch.setattr(fused, "CHUNK", 16)
    monkeypatch.setattr(fused, "BLOCK", 8)


def by_definition(data: bytes) -> str:
    total = [0, 0]
    padded = data + bytes(-len(data) % 8)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    for lane, (a, f, b, g, c) in enumerate(naive.MIXERS):
        given = [word + (i + 1) * naive.STEPS[lane] for i, word in enumerate(words)]
        for x in (*given, len(data) ^ naive.LENGTH):
            x %= 2**64
            x = (x ^ x >> a) * f % 2**64
            x = (x ^ x >> b) * g % 2**64
            total[lane] += x ^ x >> c
    return "".join(f"{lane % 2**64:016x}" for lane in total)


def digest(tensor: Tensor) -> str:
    (found,) = digests([tensor])
    return found


def random_bytes(count: int) -> Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


@pytest.mark.parametrize("late", [0, 1, 4, 7])
def test_every_length_and_start_is_as_defined(late: int) -> None:
    """All at once, so that neighbours must not leak into each other."""
    data = random_bytes(700)
    parts = [data[late : late + n] for n in (*range(18), 39, 40, 41, 127, 128, 129, 300)]
    expected = [by_definition(part.numpy().tobytes()) for part in parts]
    assert digests(parts) == expected
    given = data.to(DEVICE)
    parts = [given[late : late + len(part)] for part in parts]
    assert texts(fused.lanes_fused(parts)) == expected


def test_a_number_by_hand() -> None:
    """Splitmix64 of state 0 begins with this number; an empty tensor leaves only its length."""
    zero, empty = naive_lanes([torch.zeros(1, dtype=torch.int64), torch.zeros(0)])
    length = naive._mixed(np.array([8 ^ naive.LENGTH], np.uint64), 0)
    assert (int(zero[0]) - int(length[0])) % 2**64 == 0xE220A8397B1DCDAF
    assert texts(empty[None]) == [by_definition(b"")]


def test_any_dtype_shape_and_number_of_threads() -> None:
    kinds = (torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool)
    tensors = [(torch.randn(3, 5, 7) * 9).to(kind) for kind in kinds]
    tensors += [torch.tensor(2.5), torch.zeros(0, 4), torch.randn(4, 4, requires_grad=True)]
    expected = [
        by_definition(t.detach().view(-1).view(torch.uint8).numpy().tobytes()) for t in tensors
    ]
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert texts(lanes(tensors)) == expected
    finally:
        torch.set_num_threads(before)
    assert texts(fused.lanes_fused([t.to(DEVICE) for t in tensors])) == expected
    assert digests([]) == []


def test_layout_does_not_count() -> None:
    x = torch.randn(6, 10)
    for view in (x.T, x[:, ::2], x[1:3, 4:9], x[:1].expand(3, 10)):
        assert digest(view) == digest(view.contiguous()) != digest(x)
    given = x.to(DEVICE)
    assert torch.equal(fused.lanes_fused([given.T]).cpu(), lanes([x.T.contiguous()]))


def flip_bit(x: Tensor, at: int) -> Tensor:
    words = x.clone()
    flat = words.view(torch.int32).view(-1)
    flat[at % len(flat)] ^= 1 << (at * 7 % 31)
    return words


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"bit {at}": lambda x, at=at: flip_bit(x, at) for at in range(0, 77, 4)},
    "zeros behind": lambda x: torch.cat([x.view(-1), torch.zeros(2)]),
    "one zero behind": lambda x: torch.cat([x.view(-1), torch.zeros(1)]),
    "one less": lambda x: x.view(-1)[:-1],
    "zeros before": lambda x: torch.cat([torch.zeros(2), x.view(-1)]),
    "negated": lambda x: -x,
    "halves changed about": lambda x: torch.cat([x[4:], x[:4]]),
    "rows upside down": lambda x: x.flip(0),
    "turned": lambda x: x.T,
    "neighbours changed about": lambda x: x.view(-1, 2).flip(1).view_as(x),
    "words changed about": lambda x: x.view(-1, 2, 2).flip(1).view_as(x),
    "rounded": lambda x: x.bfloat16().float(),
    "as bf16": lambda x: x.bfloat16(),
    "moved by one": lambda x: x.view(-1).roll(1).view_as(x),
    "moved by a word": lambda x: x.view(-1).roll(2).view_as(x),
    "scaled": lambda x: x * (1 + 2e-7),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_goes_wrong_on_the_way_shows_in_each_half(fault: str) -> None:
    x = torch.randn(8, 8)
    wrong = FAULTS[fault](x)
    before, after = lanes([x, wrong])
    assert (before != after).all()
    assert torch.equal(fused.lanes_fused([wrong.to(DEVICE)])[0].cpu(), after)


def test_zeros_and_nans_are_their_bits() -> None:
    pairs = [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([0x7FC00000], dtype=torch.int32), torch.tensor([0x7FC00001]).int()),
        (torch.zeros(1), torch.zeros(2)),
        (torch.zeros(0), torch.zeros(1, dtype=torch.uint8)),
        (torch.zeros(1000), torch.zeros(1001)),
    ]
    for one, other in pairs:
        assert digest(one) != digest(other)
    nan = torch.tensor([0x7FC00001], dtype=torch.int32)
    assert digest(nan.view(torch.float32)) == digest(nan)


def test_order_of_what_is_added_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(300)
    found = {digest(x)}
    for chunk in (1, 7, 1000):
        monkeypatch.setattr(naive, "CHUNK", chunk)
        found.add(digest(x))
    for chunk in (8, 32):
        monkeypatch.setattr(fused, "CHUNK", chunk)
        found.update(texts(fused.lanes_fused([x.to(DEVICE)])))
    assert len(found) == 1


@pytest.mark.parametrize("late", [0, 1, 4, 7])
def test_what_is_copied_on_the_way_has_its_bytes(late: int) -> None:
    """Of every length and start; zeros behind each, and nothing else is touched."""
    data = random_bytes(700)
    parts = [data[late : late + n] for n in (*range(18), 39, 40, 41, 127, 128, 129, 300)]
    sizes = [-(-len(part) // 16) * 16 + 32 for part in parts]
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    expected = torch.full((sum(sizes),), 0xAB, dtype=torch.uint8)
    untouched = expected.clone()
    for part, start in zip(parts, starts, strict=True):
        expected[start : start - len(part) // -16 * 16] = 0
        expected[start : start + len(part)] = part
    payload = untouched.clone()
    assert torch.equal(naive_copied_lanes(parts, starts, payload), naive_lanes(parts))
    assert torch.equal(payload, expected)
    given, payload = data.to(DEVICE), untouched.to(DEVICE)
    parts = [given[late : late + len(part)] for part in parts]
    found = fused.copied_lanes_fused(parts, starts, payload)
    assert torch.equal(found, fused.lanes_fused(parts))
    assert torch.equal(payload.cpu(), expected)


def test_copies_of_any_dtype_and_layout() -> None:
    turned, single = torch.randn(6, 10).T, torch.tensor(2.5)
    tensors = [turned, turned.bfloat16(), single, torch.zeros(0, 4), turned > 0]
    own = torch.zeros(512, dtype=torch.uint8)
    found = copied_lanes(tensors, [0, 240, 368, 384, 384], own)
    assert texts(found) == digests(tensors)
    assert torch.equal(own[:240].view(torch.float32).view(10, 6), turned)
    assert torch.equal(own[384:444].view(torch.bool).view(10, 6), turned > 0)
    given, payload = [t.to(DEVICE) for t in tensors], torch.zeros_like(own).to(DEVICE)
    again = fused.copied_lanes_fused(given, [0, 240, 368, 384, 384], payload)
    assert torch.equal(again.cpu(), found) and torch.equal(payload.cpu(), own)


def test_copies_begin_where_words_do() -> None:
    room = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"multiples of 16 in memory, got \[0, 24\]"):
        copied_lanes([torch.zeros(2), torch.zeros(2)], [0, 24], room)
    with pytest.raises(ValueError, match=r"multiples of 16 in memory, got \[0\]"):
        copied_lanes([torch.zeros(2)], [0], room[4:])
    with pytest.raises(ValueError, match=r"one device, got \['cpu', 'meta'\]"):
        copied_lanes([torch.zeros(2, device="meta")], [0], room)


def test_tensors_of_several_devices() -> None:
    x = torch.randn(5)
    with pytest.raises(ValueError, match=r"one device, got \['cpu', 'meta'\]"):
        lanes([x, x.to("meta")])
    assert digests([x, x.to(DEVICE), x]) == [digest(x)] * 3
