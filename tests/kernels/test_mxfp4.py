"""MXFP4 against its definition, number by number."""

from __future__ import annotations

import math

import pytest
import torch

from farhorizon.kernels.moe import mxfp4, mxfp4_decode, mxfp4_encode, mxfp4_rounded

LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def value(code: int) -> float:
    return math.copysign(LEVELS[code & 7], -1 if code & 8 else 1)


def reference(row: list[float]) -> tuple[list[int], list[int]]:
    """Bytes and scales of one row, in double precision."""
    codes, scales = [], []
    for first in range(0, len(row), 32):
        group = row[first : first + 32]
        largest = max(map(abs, group))
        shared = math.frexp(largest)[1] - 3 if largest else 0
        shared = min(max(shared, -127), 127)
        scales.append(shared + 127)
        for x in group:
            size = abs(math.ldexp(x, -shared))
            near = min(range(8), key=lambda c: (abs(LEVELS[c] - size), c % 2))
            codes.append(near | (8 if math.copysign(1, x) < 0 else 0))
    return [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)], scales


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().view(torch.int32)


def test_every_byte_decodes_low_nibble_first_and_comes_back() -> None:
    # 16 of the 256 bytes a row; the last two bytes of each group hold 6 and -4: the scale is fixed
    every = torch.arange(256, dtype=torch.uint8).view(32, 8)
    packed = torch.cat([every, torch.full((32, 8), 0xE7, dtype=torch.uint8)], 1)
    for shared in (0, 1, 100, 127, 200, 252):
        scale = torch.full((32, 1), shared, dtype=torch.uint8)
        for dtype in (torch.float32, torch.bfloat16):
            numbers = mxfp4_decode(packed, scale, dtype)
            expected = [
                [math.ldexp(value(n), shared - 127) for b in row for n in (b & 15, b >> 4)]
                for row in packed.tolist()
            ]
            assert torch.equal(bits(numbers), bits(torch.tensor(expected)))
            again = mxfp4_encode(numbers)
            assert torch.equal(again[0], packed) and torch.equal(again[1], scale)


def test_ties_go_to_the_even_code_and_large_numbers_saturate() -> None:
    given = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.99, 4.0, 6.0, 0.2499, 0.2501, 4.999, 5.001]
    wanted = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 4.0, 6.0, 0.0, 0.5, 4.0, 6.0]
    row = torch.tensor([[*given, *(-x for x in given), 0.0, -0.0, 1.0, 3.0]])
    packed, scale = mxfp4_encode(row)
    assert scale.tolist() == [[127]]
    expected = torch.tensor([[*wanted, *(-x for x in wanted), 0.0, -0.0, 1.0, 3.0]])
    assert torch.equal(bits(mxfp4_decode(packed, scale)), bits(expected))
    # 8 is the first that takes a larger scale; zeros have scale 1
    maxima = torch.tensor([0.0, 3.0, 4.0, 6.0, 7.99, 8.0, 1e-45, 3e38])
    _, scale = mxfp4_encode(maxima[:, None].expand(-1, 32))
    assert scale[:, 0].tolist() == [127, 126, 127, 127, 127, 128, 0, 252]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_encoding_is_the_definition(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mxfp4, "CHUNK", 128)  # several chunks, the last of them short
    torch.manual_seed(0)
    weight = (torch.randn(3, 5, 64) * torch.logspace(-6, 4, 5)[:, None]).to(dtype)
    weight = weight.transpose(0, 1)
    assert not weight.is_contiguous()
    packed, scale = mxfp4_encode(weight)
    assert packed.shape == (5, 3, 32) and scale.shape == (5, 3, 2)
    for i in range(5):
        for j in range(3):
            assert (packed[i, j].tolist(), scale[i, j].tolist()) == reference(
                weight[i, j].float().tolist()
            )
    decoded = mxfp4_decode(packed, scale, dtype)
    assert torch.equal(mxfp4_rounded(weight), decoded)
    assert torch.equal(mxfp4_rounded(decoded), decoded)
    assert torch.equal(mxfp4_decode(*mxfp4_encode(decoded), dtype), decoded)


def test_the_gradient_goes_straight_through() -> None:
    weight = torch.randn(4, 32, requires_grad=True)
    upstream = torch.randn(4, 32)
    mxfp4_rounded(weight).backward(upstream)
    assert weight.grad is not None and torch.equal(weight.grad, upstream)


def test_what_is_not_finite_stays_so() -> None:
    weight = torch.ones(3, 64)
    weight[0, 3], weight[1, 40] = torch.nan, -torch.inf
    packed, scale = mxfp4_encode(weight)
    assert scale.tolist() == [[255, 125], [125, 255], [125, 125]]
    for out in (mxfp4_decode(packed, scale), mxfp4_rounded(weight)):
        lost = torch.isnan(out).unflatten(1, (2, 32)).all(-1)
        assert lost.tolist() == [[True, False], [False, True], [False, False]]
        assert bool((out[2] == 1).all())


def test_wrong_shapes_are_refused() -> None:
    for wrong in (torch.zeros(2, 33), torch.zeros(2, 32, dtype=torch.int32)):
        for function in (mxfp4_encode, mxfp4_rounded):
            with pytest.raises(ValueError, match="groups of 32"):
                function(wrong)
    with pytest.raises(ValueError, match="does not belong"):
        mxfp4_decode(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8))
