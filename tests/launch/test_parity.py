"""The comparison with vLLM: figures by hand, and a policy on which mistakes show."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from farhorizon.configs.errors import RunFailed
from farhorizon.launch import bench_parity, cli, parity
from farhorizon.launch.parity import FAINT, MISTAKES, Scored
from farhorizon.policy import Policy, PolicyConfig
from farhorizon.policy.checkpoint import load_policy, save_policy
from farhorizon.rollout.vllm_probe import Served, read_output

ONE_LAYER = Scored(
    torch.zeros(2),
    torch.tensor([[[0, 1]], [[2, 3]]]),
    torch.tensor([[[0.9, 0.8, 0.5, 0.1]], [[0.1, 0.2, 0.7, 0.6]]]),
)


@pytest.fixture(scope="module")
def policy() -> Policy:
    config = PolicyConfig.tiny(
        hidden_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_experts=16,
        num_experts_per_token=4,
        v_head_dim=32,
    )
    return parity.random_policy(config, 0, "cpu")


def served(policy: Policy, ids: torch.Tensor) -> Served:
    """What an engine would give that computes just as ``policy`` does."""
    scored = parity.score(policy, ids)
    routes = torch.cat([torch.zeros_like(scored.routes[:, :1]), scored.routes.flip(-1)], 1)
    return Served(
        ids.numpy(), len(ids) - 8, scored.logprobs.numpy(), routes.numpy().astype(np.uint8)
    )


def wide(policy: Policy, folder: Path) -> Policy:
    save_policy(folder, policy)
    return load_policy(folder, torch.float32)


def test_the_order_of_routes_means_nothing() -> None:
    found = parity.compare_routes(ONE_LAYER, torch.tensor([[[1, 0]], [[3, 2]]]))
    assert (found.slots, found.shared, len(found.margin)) == (4, 4, 0)
    assert parity.route_summary([found], 0.1)["margin_max"] == 0


def test_margins_by_hand() -> None:
    """Token 0: 1 left out for 2, 0.8 - 0.5. Token 1: 2 and 3 for 0 and 1, at most 0.7 - 0.1."""
    found = parity.compare_routes(ONE_LAYER, torch.tensor([[[0, 2]], [[0, 1]]]))
    assert (found.slots, found.shared) == (4, 1)
    assert found.token.tolist() == [0, 1]
    assert found.margin.tolist() == pytest.approx([0.3, 0.6])
    result = parity.route_summary([found, found], 0.5)
    assert result["shared"] == 0.25
    assert (result["disagreements"], result["margins_too_large"]) == (4, 2)
    assert result["margin_max"] == pytest.approx(0.6)


def test_routes_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="2 different experts"):
        parity.compare_routes(ONE_LAYER, torch.zeros(2, 1, 2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"shape \[2, 2, 2\]"):
        parity.compare_routes(ONE_LAYER, torch.zeros(2, 2, 2, dtype=torch.long))


def test_differences_by_position() -> None:
    difference = torch.tensor([1.0, -3.0, 2.0, 0.5])
    rows = parity.by_position(difference, torch.tensor([1, 1023, 1024, 5000]))
    assert [row["up_to"] for row in rows] == [1024, 2048, 8192]
    assert rows[0] == {"up_to": 1024, "tokens": 2, "mean": 2.0, "max": 3.0, "bias": -1.0}
    assert rows[2]["mean"] == 0.5


def test_heads_are_swapped_whole() -> None:
    weight = torch.arange(6.0)[:, None]
    assert parity.swapped(weight, 3).flatten().tolist() == [2, 3, 0, 1, 4, 5]


def test_the_policy_is_far_from_where_it_starts(policy: Policy, tmp_path: Path) -> None:
    state = policy.state_dict()
    queries = torch.cat([t.flatten() for n, t in state.items() if n.endswith("_res_proj.weight")])
    assert 0.45 < float(queries.float().std()) < 0.55
    thresholds = torch.cat([router.e_score_correction_bias for router in policy.routers()])
    assert 0.08 < float(thresholds.std()) < 0.12
    decays = torch.cat([t for n, t in state.items() if n.endswith("A_log")])
    assert float(decays.abs().max()) < 1
    assert float(decays.std()) > 0.4
    ids = torch.randint(512, (64,))
    exact = wide(policy, tmp_path)
    assert parity.logit_std(exact, ids) > bench_parity.LEAST_STD
    for name, tensor in load_policy(tmp_path, torch.bfloat16).state_dict().items():
        assert tensor.dtype == state[name].dtype, name
        assert torch.equal(tensor, state[name]), name
    assert {n.split(".")[-2] for n, t in state.items() if t.dtype == torch.float32} == {
        *("self_attn", "q_conv1d", "k_conv1d", "v_conv1d", "o_norm", "gate")
    }


def test_mistakes_move_logprobs_and_are_undone(policy: Policy, tmp_path: Path) -> None:
    exact = wide(policy, tmp_path)
    before = {name: tensor.clone() for name, tensor in exact.state_dict().items()}
    ids = torch.randint(512, (256,))
    result = bench_parity.check_policy(exact, [np.zeros(400, np.int64), ids.numpy()])
    assert list(result["mistakes"]) == list(MISTAKES)
    assert min(result["mistakes"].values()) > bench_parity.LEAST_MOVED, result["mistakes"]
    assert list(result["faint"]) == list(FAINT)
    assert min(result["faint"].values()) > 0, result["faint"]
    settings = [(m.__dict__.get("eps"), m.__dict__.get("lower_bound")) for m in exact.modules()]
    assert {eps for eps, _ in settings} == {None, 1e-5}
    assert {bound for _, bound in settings} == {None, -5.0}
    for name, tensor in exact.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_an_engine_of_another_rounding_passes_and_a_wrong_one_does_not(
    policy: Policy, tmp_path: Path
) -> None:
    exact = wide(policy, tmp_path / "policy")
    lengths = (1100, 200)
    prompts = bench_parity.draw_prompts(policy.config, lengths, 0)
    ids = [torch.from_numpy(prompt) for prompt in prompts]
    base = bench_parity.check_policy(exact, prompts)

    def record(engine: Policy) -> dict[str, object]:
        answers = [served(engine, one) for one in ids]
        ours, truth = (bench_parity.score_all(p, answers) for p in (policy, exact))
        found = [bench_parity.compare(*parts) for parts in zip(answers, ours, truth, strict=True)]
        bench_parity.write(tmp_path / "out", base | bench_parity.figures(found), found)
        return json.loads((tmp_path / "out" / "parity.json").read_text())

    good = record(exact)
    assert bench_parity.judge(good) == []
    assert good["logprobs"]["served_fp32"]["max"] == 0  # type: ignore[index]
    assert good["logprobs"]["served_ours_sampled"]["tokens"] == 16  # type: ignore[index]
    rows = good["logprobs"]["served_ours_by_position"]  # type: ignore[index]
    assert [(row["up_to"], row["tokens"]) for row in rows] == [(1024, 1222), (2048, 76)]
    assert good["routes"]["slots"] == 1298 * 7 * 4  # type: ignore[index]
    with np.load(tmp_path / "out" / "parity.npz") as arrays:
        assert arrays["served"][arrays["sequence"] == 1].shape == (199,)
        assert len(arrays["margin"]) == good["routes"]["disagreements"]  # type: ignore[index]
    for mistake in MISTAKES:
        with parity.mistaken(exact, mistake):
            assert "log-probs differ by" in bench_parity.judge(record(exact))[0], mistake
    assert len(bench_parity.judge(good | {"logit_std": float("nan")})) == 1


def test_what_vllm_returns_is_read() -> None:
    def entry(token: int, logprob: float) -> dict[int, SimpleNamespace]:
        return {token: SimpleNamespace(logprob=logprob)}

    completion = SimpleNamespace(
        token_ids=[7, 8],
        logprobs=[entry(7, -3.0), entry(8, -4.0)],
        routed_experts=np.zeros((4, 2, 1), np.uint8),
    )
    output = SimpleNamespace(
        prompt_token_ids=[4, 5, 6],
        prompt_logprobs=[None, entry(5, -1.0), entry(6, -2.0)],
        outputs=[completion],
    )
    found = read_output(output)
    assert found.token_ids.tolist() == [4, 5, 6, 7, 8]
    assert found.prompt == 3
    assert found.logprobs.tolist() == [-1, -2, -3, -4]
    completion.routed_experts = None
    with pytest.raises(RunFailed, match="routes of 4 tokens wanted, got none"):
        read_output(output)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "parity"]) == 2
    assert "bench parity needs a GPU" in capsys.readouterr().err
