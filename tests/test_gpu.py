"""A CUDA device gives what the CPU gives: policy, decode state, generator, training."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from farhorizon.policy import DecodeState, Policy, PolicyConfig
from farhorizon.rollout.generator import NativeGenerator
from farhorizon.rollout.sampler import stream_key
from farhorizon.rollout.types import SamplingParams

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def pair() -> tuple[Policy, Policy]:
    """The same random policy on the CPU and on the device; depth queries and thresholds not 0."""
    torch.manual_seed(0)
    policy = Policy(PolicyConfig.tiny(vocab_size=128))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "res_proj" in name:
                parameter.normal_(0, 0.5)
        for router in policy.routers():
            router.e_score_correction_bias.normal_(0, 0.1)
    with CUDA:
        other = Policy(policy.config)
    other.load_state_dict(policy.state_dict())
    return policy, other


def score(policy: Policy, ids: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(len(ids) - 1, device=ids.device)
    with torch.no_grad():
        return policy(ids[None], edges, rows=rows, targets=ids[1:]).logprobs


def test_logprobs_equal_those_of_the_cpu() -> None:
    cpu, gpu = pair()
    ids, edges = torch.randint(0, 128, (300,)), torch.tensor([0, 100, 101, 300])
    difference = score(gpu, ids.to(CUDA), edges.to(CUDA)).cpu() - score(cpu, ids, edges)
    assert float(difference.abs().max()) < 1e-4


def test_pieces_and_steps_equal_one_pass() -> None:
    _, gpu = pair()
    ids = torch.randint(0, 128, (2, 90), device=CUDA)
    with torch.no_grad():
        whole = gpu(ids).logits
        state = DecodeState.empty(gpu.config, 2, CUDA)
        pieces = [gpu(x, state=state).logits for x in (ids[:, :50], *ids[:, 50:].split(1, 1))]
    assert float((torch.cat(pieces, 1) - whole).abs().max()) < 1e-3


def test_generated_logprobs_are_those_of_the_policy() -> None:
    _, gpu = pair()
    generator = NativeGenerator(gpu, seed=3)
    prompt = np.arange(1, 20)
    keys = [stream_key(3, "task", sibling) for sibling in range(4)]
    generator.open(prompt, keys, SamplingParams(max_tokens=24))
    done = []
    while generator.busy:
        done += generator.step()
    assert len(done) == 4
    for _, completion in done:
        ids = torch.tensor([*prompt, *completion.token_ids], device=CUDA)
        scored = score(gpu, ids, torch.tensor([0, len(ids)], device=CUDA))[len(prompt) - 1 :]
        assert np.abs(scored.cpu().numpy() - completion.logprobs).max() < 1e-3


def test_a_bf16_training_step_moves_weights_and_thresholds() -> None:
    _, gpu = pair()
    optimizer = torch.optim.AdamW(gpu.parameters(), lr=1e-3, fused=True)
    ids = torch.randint(0, 128, (1, 512), device=CUDA)
    rows = torch.arange(511, device=CUDA)
    losses = []
    for _ in range(8):
        with gpu.routing_statistics(), torch.autocast("cuda", torch.bfloat16):
            out = gpu(ids, rows=rows, targets=ids[0, 1:])
        loss = -out.logprobs.mean()
        loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in gpu.parameters())
        optimizer.step()
        optimizer.zero_grad()
        gpu.update_thresholds()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.2
    assert all(r.e_score_correction_bias.dtype == torch.float32 for r in gpu.routers())
