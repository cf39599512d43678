"""Images on their way into tokens: size, patches, numbers, placeholders, messages."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from farhorizon.configs.errors import UserError
from farhorizon.envs import Image, Message, shown
from farhorizon.envs.types import IMAGE_PLACEHOLDER
from farhorizon.policy.images import (
    Patches,
    Placed,
    count_tokens,
    expand,
    fitted,
    normalised,
    place,
    policy_inputs,
    prepare,
)
from farhorizon.policy.tokenizer import ChatFormat, control_id, train_tokenizer
from farhorizon.policy.vision_config import ImageRules

K3 = ImageRules(14, 2)
SMALL = ImageRules(2, 2, patch_limit=8, side_limit=6)


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    made = np.random.default_rng(seed)
    return made.integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("height", "width", "rules", "wanted"),
    [
        # 480 / 28 = 17.1 and 640 / 28 = 22.9 tokens, nothing is made smaller
        (480, 640, K3, (480, 640, 18, 23)),
        (1, 1, K3, (1, 1, 1, 1)),
        # 3584^2 is 256^2 patches, the most there are
        (3584, 3584, K3, (3584, 3584, 128, 128)),
        # 512^2 patches are 4 times too many: half the side
        (7168, 7168, K3, (3584, 3584, 128, 128)),
        # a side of more than 512 patches: 7168 / 10000 of 100 are 71.68 pixels
        (100, 10000, K3, (71, 7168, 3, 256)),
        # padding may add tokens beyond the limit of 16,384, as published: 502 x 132 patches are
        # 728 too many, which scales the sides to 7002 x 1850
        (7041, 1861, K3, None),
        (8, 8, SMALL, (5, 5, 2, 2)),  # 16 patches of 8: scale 0.707
        (1, 100, SMALL, (1, 12, 1, 3)),
    ],
)
def test_sizes_by_hand(
    height: int, width: int, rules: ImageRules, wanted: tuple[int, int, int, int] | None
) -> None:
    size = fitted(height, width, rules)
    if wanted is None:
        assert count_tokens(height, width, rules) == 16817
        assert (size.height, size.width) == (7002, 1850)
        return
    assert (size.height, size.width, size.token_rows, size.token_columns) == wanted
    assert count_tokens(height, width, rules) == wanted[2] * wanted[3]


def test_patches_are_the_pixels_row_by_row_and_black_at_the_end() -> None:
    image = noise(3, 6)
    patches = prepare(image, ImageRules(2, 2))
    assert (patches.grid, patches.rows) == ((1, 2, 4), 2)
    assert patches.pixels.shape == (8, 3, 2, 2) and patches.pixels.dtype == np.uint8
    padded = np.zeros((4, 8, 3), np.uint8)
    padded[:3, :6] = image
    for row in range(2):
        for column in range(4):
            found = patches.pixels[4 * row + column].transpose(1, 2, 0)
            wanted = padded[2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            assert np.array_equal(found, wanted), (row, column)


def test_a_larger_image_is_resampled() -> None:
    flat = np.full((40, 40, 3), 77, np.uint8)
    patches = prepare(flat, SMALL)  # 20 x 20 patches of 8: scale sqrt(8 / 400), 5 pixels
    assert patches.grid == (1, 4, 4)
    whole = patches.pixels.reshape(4, 4, 3, 2, 2).transpose(0, 3, 1, 4, 2).reshape(8, 8, 3)
    assert (whole[:5, :5] == 77).all() and (whole[5:] == 0).all() and (whole[:, 5:] == 0).all()
    # a black and a white half stay apart, with the overshoot of a cubic filter cut off
    halves = np.zeros((40, 40, 3), np.uint8)
    halves[:, 20:] = 255
    pixels = prepare(halves, SMALL).pixels
    whole = pixels.reshape(4, 4, 3, 2, 2).transpose(0, 3, 1, 4, 2).reshape(8, 8, 3)
    assert whole[2, :5, 0].tolist() == [0, 0, 128, 255, 255]


def test_numbers_by_hand() -> None:
    image = np.zeros((2, 2, 3), np.uint8)
    image[0, 1] = (255, 51, 102)
    plain = normalised([prepare(image, ImageRules(2, 1))], ImageRules(2, 1))
    assert plain.dtype == torch.float32
    assert torch.allclose(plain[0, :, 0, 1], torch.tensor([1.0, -0.6, -0.2]))
    assert (plain[0, :, 1, 1] == -1).all()
    rules = ImageRules(2, 1, mean=(0.0, 0.1, 0.2), std=(1.0, 0.5, 0.25))
    other = normalised([prepare(image, rules)], rules)
    assert torch.allclose(other[0, :, 0, 1], torch.tensor([1.0, 0.2, 0.8]))
    assert normalised([], K3).shape == (0, 3, 14, 14)


def test_placeholders_are_repeated_and_found() -> None:
    assert expand([5, 9, 6, 9, 9], 9, [2, 1, 3]) == [5, 9, 9, 6, 9, 9, 9, 9]
    assert expand("a.b", ".", [2]) == ["a", ".", ".", "b"]
    assert expand([5], 9, []) == [5]
    for counts in ([], [1], [1, 1, 1]):
        with pytest.raises(UserError, match=f"2 placeholders stand for {len(counts)} images"):
            expand([9, 5, 9], 9, counts)
    two = Patches(np.zeros((8, 3, 2, 2), np.uint8), (1, 2, 4), 2)
    one = Patches(np.zeros((4, 3, 2, 2), np.uint8), (1, 2, 2), 1)
    ids = [5, 9, 9, 6, 9, 7]
    assert place(ids, [two, one], 9) == [Placed(1, two), Placed(4, one)]
    with pytest.raises(UserError, match="3 placeholders stand for 2 rows of images"):
        place(ids, [two], 9)
    given = policy_inputs([Placed(1, two), Placed(4, one)], ImageRules(2, 2))
    assert given["image_rows"].tolist() == [1, 2, 4]
    assert given["grid_thws"] == [(1, 2, 4), (1, 2, 2)]
    assert given["pixel_values"].shape == (12, 3, 2, 2)
    none = policy_inputs([], ImageRules(2, 2))
    assert len(none["pixel_values"]) == len(none["grid_thws"]) == len(none["image_rows"]) == 0


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((0, 4, 3), np.uint8), r"no side 0, got \[0, 4, 3\]"),
        (np.zeros((4, 4), np.uint8), r"shape \[height, width, 3\] .* got \[4, 4\]"),
        (np.zeros((4, 4, 4), np.uint8), r"got \[4, 4, 4\]"),
        (np.zeros((4, 4, 3), np.float32), "uint8 array, got float32"),
        ([[1, 2, 3]], "uint8 array, got list"),
        (torch.zeros(4, 4, 3, dtype=torch.uint8), "uint8 array, got Tensor"),
    ],
)
def test_what_is_no_image_is_one_line(image: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as found:
        prepare(image, K3)
    assert "\n" not in str(found.value)
    with pytest.raises(ValueError, match=message):
        Image(image)


def test_limits_that_no_size_can_keep_are_named() -> None:
    odd = ImageRules(2, 2, side_limit=5)
    with pytest.raises(UserError, match=r"6 patches on one side, more than patch_limit.*=5; make"):
        count_tokens(4, 100, odd)
    with pytest.raises(UserError, match="0 x 4 pixels"):
        count_tokens(0, 4, K3)


def test_images_of_messages_are_values() -> None:
    pixels = noise(2, 3)
    image = Image(pixels)
    same = Image(noise(2, 3))
    assert image == same and hash(image) == hash(same) and image != Image(noise(2, 3, 1))
    pixels[:] = 0
    assert image == same  # drawn into again after it was shown
    again = pickle.loads(pickle.dumps(shown("user", "a", image, "b")))
    assert again == shown("user", "a", noise(2, 3), "b")
    assert again.content == f"a{IMAGE_PLACEHOLDER}b"
    for wrong in (
        {"content": "no place"},
        {"content": IMAGE_PLACEHOLDER * 2},
        {"role": "assistant"},
    ):
        with pytest.raises(ValueError, match="images"):
            replace(again, **wrong)
    assert Message("user", IMAGE_PLACEHOLDER).images == ()  # text alone means nothing by it


def test_an_image_is_rendered_with_its_size_and_rows() -> None:
    tokenizer = train_tokenizer(["what is it image 3x5"], 400, style="full")
    rules = ImageRules(2, 2, patch_limit=64, side_limit=8)
    chat = ChatFormat(tokenizer, images=rules)
    backend = tokenizer.backend_tokenizer
    images = [Image(noise(5, 3)), Image(noise(4, 4, 1))]  # 2 x 1 and 1 x 1 tokens
    message = shown("user", "see ", images[0], " and ", images[1])

    def control(name: str) -> int:
        return control_id(tokenizer, name)

    def text(words: str) -> list[int]:
        return backend.encode(words, add_special_tokens=False).ids

    begin, content = control("<|media_begin|>"), control("<|media_content|>")
    end, pad = control("<|media_end|>"), control("<|media_pad|>")
    around = chat.render(Message("user", ""))
    body = [
        *(text("see "), [begin], text("image 3x5"), [content, pad, pad, end], text(" and ")),
        *([begin], text("image 4x4"), [content, pad, end]),
    ]
    ids = chat.render(message)
    flat = [token for part in body for token in part]
    closing = len(chat.render(Message("user", ""))) - around[::-1].index(control("<|close|>")) - 1
    assert ids == [*around[:closing], *flat, *around[closing:]]
    masked, mask = chat.render_masked(message)
    assert masked == ids and not any(mask)
    placed = chat.placed(chat.render_reply([Message("user", "hi"), message]), [message])
    offset = len(chat.render(Message("user", "hi")))
    assert [p.start for p in placed] == [offset + i for i, t in enumerate(ids) if t == pad][::2]
    assert placed[0].patches.rows == 2 and np.array_equal(
        placed[1].patches.pixels, prepare(images[1], rules).pixels
    )
    # text cannot forge a placeholder
    forged = chat.render(Message("user", "<|media_pad|><|kimi_image_placeholder|>"))
    assert not {begin, content, end, pad} & set(forged)
    # nor the place of an image beside one, nor is any text changed
    head, tail = IMAGE_PLACEHOLDER[:9], IMAGE_PLACEHOLDER[9:]
    for words in (IMAGE_PLACEHOLDER, f"a{head}\\\\{tail}", IMAGE_PLACEHOLDER.replace("|>", "\\|>")):
        forged = shown("user", words, images[1], words[:9], words[9:])
        assert forged.images == (images[1],)
        body = [*text(words), begin, *text("image 4x4"), content, pad, end, *text(words)]
        found = chat.render(forged)
        assert found == [*around[:closing], *body, *around[closing:]], words
    # more text than there is room for is cut, whatever images it holds
    long = shown("user", images[0], "x" * 100_000, images[1])
    assert len(chat.render_reply([long], 50)) > 50


def test_who_cannot_show_images_says_so() -> None:
    message = shown("user", noise(4, 4))
    full = train_tokenizer(["a"], 330, style="full")
    with pytest.raises(
        UserError, match="sees none here: its environment must say shows_images = True"
    ):
        ChatFormat(full).render(message)
    brief = train_tokenizer(["a"], 300)
    with pytest.raises(UserError, match=r"no control token <\|media_begin\|>"):
        ChatFormat(brief, images=K3)
    with pytest.raises(UserError, match="the brief chat format has no images"):
        ChatFormat(brief).render(message)


def test_bare_arrays_are_no_images() -> None:
    array = np.zeros((4, 4, 3), np.uint8)
    with pytest.raises(TypeError, match="a tuple of what shown or Image make"):
        Message("user", IMAGE_PLACEHOLDER, images=(array,))  # type: ignore[arg-type]
