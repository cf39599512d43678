"""Images from an environment to the learner: what was sampled is what would be trained."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from farhorizon.configs.errors import UserError
from farhorizon.configs.schema import RolloutConfig
from farhorizon.envs import Image
from farhorizon.envs.types import Task
from farhorizon.policy import Policy
from farhorizon.policy.checkpoint import Checkpoint, load_checkpoint
from farhorizon.policy.images import Placed, prepare
from farhorizon.policy.tokenizer import ChatFormat
from farhorizon.policy.vision_config import ImageRules
from farhorizon.rl.advantages import group_relative
from farhorizon.rl.batch import samples_of_groups, shares
from farhorizon.rollout.episode import run_groups
from farhorizon.rollout.generator import NativeGenerator
from farhorizon.rollout.sight import shifted
from farhorizon.rollout.types import Group, SamplingParams

from ..fakes import PictureEnv

PARAMS = SamplingParams(1.0, 4)


@pytest.fixture(scope="module")
def seeing(seeing_checkpoint: Path) -> Checkpoint:
    """The policy of the checkpoint with weights that make its sight matter."""
    loaded = load_checkpoint(seeing_checkpoint, vision=True)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in loaded.policy.named_parameters():
            if name.startswith(("vision_tower", "mm_projector")):
                parameter.normal_(1 if "norm" in name else 0, 0.5)
    return loaded


def rules(policy: Policy) -> ImageRules:
    found = policy.config.image_rules
    assert found is not None
    return found


def play(
    seeing: Checkpoint, context: int, visible: int | None = None, **options: Any
) -> list[Group]:
    PictureEnv.built = 0
    policy = seeing.policy
    groups, _ = run_groups(
        NativeGenerator(policy, seed=3, **options),
        [Task(f"t/{seed}", seed) for seed in range(4)],
        4,
        PictureEnv,
        ChatFormat(seeing.tokenizer, images=rules(policy)),
        RolloutConfig(max_turn_tokens=8),
        context,
        visible,
    )
    return groups


def gaps(policy: Policy, groups: Sequence[Group], tokens: int, blind: bool = False) -> list[float]:
    """Largest difference between sampled and trained log-probs of each packed batch."""
    kept, _ = samples_of_groups(groups, lambda r, ids: group_relative(torch.rand_like(r), ids))
    out = []
    for share in shares([s for group in kept for s in group], 1, tokens):
        for batch in pickle.loads(pickle.dumps(share)).micro_batches:
            ids = torch.from_numpy(batch.input_ids)
            rows = torch.from_numpy(np.flatnonzero(batch.loss_mask)) - 1
            with torch.no_grad():
                found = policy(
                    ids[None],
                    torch.from_numpy(batch.cu_seqlens),
                    rows=rows,
                    targets=ids[rows + 1],
                    **({} if blind else policy.image_inputs(batch.images)),
                ).logprobs
            wanted = torch.from_numpy(batch.behavior_logprobs[batch.loss_mask])
            out.append(float((found - wanted).abs().max()))
    return out


@pytest.mark.parametrize("prefill", [8192, 40])
def test_sampled_log_probs_are_those_of_training(seeing: Checkpoint, prefill: int) -> None:
    groups = play(seeing, 200, prefill_tokens=prefill)
    trajectories = [t for group in groups for t in group.trajectories]
    counts = [len(t.images) for t in trajectories]
    assert {0, 1, 2, 3} <= set(counts)  # none at all, one later, two at first, one more later
    pad = seeing.policy.config.media_token_id
    for t in trajectories:
        given = np.concatenate([s.token_ids for s in t.segments if not s.sampled])
        assert (given == pad).sum() == sum(i.patches.rows for i in t.images)
        for image in t.images:
            assert (t.token_ids[image.start : image.end] == pad).all()
    # siblings saw different pictures of perhaps the same size
    first = groups[0].trajectories
    assert len({t.images[0].patches.pixels.tobytes() for t in first}) == 4
    for tokens in (1000, 1):
        assert max(gaps(seeing.policy, groups, tokens)) < 1e-4
    assert max(gaps(seeing.policy, groups, 1, blind=True)) > 0.1


def test_siblings_that_see_other_pixels_share_no_prefill(seeing: Checkpoint) -> None:
    """The same ids, for pictures of one size, and yet another prompt."""

    class Same(PictureEnv):
        def picture(self) -> np.ndarray:
            return self.drawn.integers(0, 256, (4, 4, 3), dtype=np.uint8)

    built = Same.built
    policy = seeing.policy
    groups, stats = run_groups(
        NativeGenerator(policy, seed=3),
        [Task("t", 0)],
        3,
        Same,
        ChatFormat(seeing.tokenizer, images=rules(policy)),
        RolloutConfig(max_turn_tokens=4),
        200,
    )
    assert Same.built > built and stats.reused_tokens == 0
    prompts = {t.segments[0].token_ids.tobytes() for t in groups[0].trajectories}
    assert len(prompts) == 1
    assert max(gaps(policy, groups, 1000)) < 1e-4


def test_a_window_may_cut_an_image(seeing: Checkpoint) -> None:
    policy = seeing.policy
    pad = policy.config.media_token_id
    image = prepare(
        np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8), rules(policy)
    )
    assert image.rows == 4
    ids = np.array([5, 6, pad, pad, pad, pad, 7, 8])
    with torch.no_grad():
        features = policy.encode_images(**_pixels(policy, [Placed(2, image)]))
        for cut in (0, 3, 5, 6):
            images = shifted([Placed(2, image)], -cut)
            assert [i.start for i in images] == ([] if cut == 6 else [2 - cut])
            seen = ids[cut:]
            rows = torch.from_numpy(np.flatnonzero(seen == pad))
            wanted = policy(
                torch.from_numpy(seen)[None],
                image_features=features[len(features) - len(rows) :],
                image_rows=rows,
                last_only=True,
            ).logits
            generator = NativeGenerator(policy, prefill_tokens=3)
            generator.open(seen, [1], PARAMS, images=images)
            completion = _finish(generator)
            first = int(completion.token_ids[0])
            logprob = float(wanted[0].log_softmax(-1)[first])
            assert float(completion.logprobs[0]) == pytest.approx(logprob, abs=1e-5)
    play(seeing, 200, visible=20)  # as an episode


def test_new_weights_read_the_images_again(seeing_checkpoint: Path) -> None:
    policy = load_checkpoint(seeing_checkpoint, vision=True).policy
    pad = policy.config.media_token_id
    made = np.random.default_rng(1)
    image = prepare(made.integers(0, 256, (4, 8, 3), dtype=np.uint8), rules(policy))
    generator = NativeGenerator(policy)
    prompt = np.array([5, pad, pad, 6])
    (session,) = generator.open(prompt, [7], PARAMS, images=[Placed(1, image)])
    before = _finish(generator)
    with generator.exclusive(), torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.startswith(("vision_tower", "mm_projector")):
                parameter.add_(torch.randn_like(parameter))
        generator.version = 1
    more = np.array([9, pad, pad, 8])
    generator.extend(session, more, PARAMS, [Placed(1, image)])
    after = _finish(generator)
    ids = torch.from_numpy(np.concatenate([prompt, before.token_ids, more, after.token_ids])).long()
    given = torch.tensor([1, 2, 9, 10])
    assert ids[given].tolist() == [pad] * 4
    with torch.no_grad():
        inputs = policy.image_inputs([Placed(1, image), Placed(9, image)])
        assert inputs["image_rows"].tolist() == given.tolist()
        out = policy(ids[None], **inputs).logits[0].log_softmax(-1)
    wanted = [float(out[t - 1, ids[t]]) for t in range(12, 12 + len(after.token_ids))]
    assert after.logprobs.tolist() == pytest.approx(wanted, abs=1e-4)


def test_a_sampled_placeholder_is_no_image(seeing: Checkpoint) -> None:
    """The policy may say the token itself; only given ones stand for images."""
    policy = seeing.policy
    pad = policy.config.media_token_id
    image = prepare(np.zeros((4, 4, 3), np.uint8), rules(policy))
    ids = torch.tensor([[5, pad, 6, pad, 7]])
    with torch.no_grad():
        out = policy(ids, **policy.image_inputs([Placed(1, image)])).logits
        with pytest.raises(UserError, match="2 placeholders of images, the images need 1"):
            policy(ids, **_pixels(policy, [Placed(1, image)]))
    assert bool(out.isfinite().all())


def test_an_environment_that_hides_that_it_shows_images_is_named(seeing: Checkpoint) -> None:
    with pytest.raises(UserError, match="its environment must say shows_images = True"):
        run_groups(
            NativeGenerator(seeing.policy),
            [Task("t", 0)],
            1,
            PictureEnv,
            ChatFormat(seeing.tokenizer),
            RolloutConfig(),
            100,
        )
    text = Policy(seeing.policy.config)
    assert text.image_inputs(()) == {}
    image = prepare(Image(np.zeros((4, 4, 3), np.uint8)), rules(seeing.policy))
    with pytest.raises(UserError, match="without its vision tower"):
        text.image_inputs([Placed(0, image)])


def _pixels(policy: Policy, images: Sequence[Placed]) -> dict[str, Tensor]:
    return {n: v for n, v in policy.image_inputs(images).items() if n != "image_rows"}


def _finish(generator: NativeGenerator) -> Any:
    while True:
        done = generator.step()
        if done:
            return done[0][1]
