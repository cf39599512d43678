"""The policy as a whole: packing, decode state, thresholds, log-probs, refused inputs."""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from farhorizon.policy import DecodeState, Policy, PolicyConfig, attention
from farhorizon.policy.attention import GatedMLA
from farhorizon.policy.packing import Packing
from farhorizon.policy.state import LatentCache, ReplayedKda
from farhorizon.policy.value import ValueHead


@pytest.fixture(scope="module")
def policy() -> Policy:
    """A tiny fp64 policy in which no part is idle: depth queries and thresholds are not zero."""
    torch.manual_seed(0)
    policy = Policy(PolicyConfig.tiny(vocab_size=64, hidden_size=32)).double()
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "res_proj" in name:
                parameter.normal_()
        for router in policy.routers():
            router.e_score_correction_bias.normal_(0, 0.1)
    return policy


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 64, (1, count), generator=torch.Generator().manual_seed(seed))


def test_packed_equals_alone_and_nothing_leaks(policy):
    ids, edges = tokens(60), [0, 25, 26, 60]
    packed = policy(ids, torch.tensor(edges)).logits[0]
    for a, b in itertools.pairwise(edges):
        alone = policy(ids[:, a:b]).logits[0]
        torch.testing.assert_close(packed[a:b], alone, atol=1e-11, rtol=1e-9)
    changed = ids.clone()
    changed[0, :25] = (changed[0, :25] + 1) % 64
    torch.testing.assert_close(policy(changed, torch.tensor(edges)).logits[0, 25:], packed[25:])


def test_rows_of_a_batch_equal_packed(policy):
    ids = tokens(48).view(3, 16)
    packed = policy(ids.view(1, 48), torch.tensor([0, 16, 32, 48])).logits
    torch.testing.assert_close(policy(ids).logits.view(1, 48, -1), packed)


@pytest.mark.parametrize("cuts", [[], [1], [2, 3], [7, 20], list(range(1, 30))])
def test_pieces_with_carried_state_equal_one_pass(policy, cuts):
    ids = tokens(30)
    whole = policy(ids).logits[0]
    state = DecodeState.empty(policy.config, 1, dtype=torch.float64)
    edges = [0, *cuts, 30]
    pieces = [policy(ids[:, a:b], state=state).logits[0] for a, b in itertools.pairwise(edges)]
    torch.testing.assert_close(torch.cat(pieces), whole, atol=1e-11, rtol=1e-9)
    assert state.lengths.tolist() == [30]


def test_ragged_pieces_continue_each_sequence(policy):
    a, b = tokens(40, 1), tokens(20, 2)
    state = DecodeState.empty(policy.config, 2, dtype=torch.float64)
    first = policy(torch.cat([a[:, :3], b[:, :17]], 1), torch.tensor([0, 3, 20]), state).logits[0]
    second = policy(torch.cat([a[:, 3:], b[:, 17:]], 1), torch.tensor([0, 37, 40]), state).logits[0]
    torch.testing.assert_close(torch.cat([first[:3], second[:37]]), policy(a).logits[0])
    torch.testing.assert_close(torch.cat([first[3:], second[37:]]), policy(b).logits[0])


def test_state_rows_fork_replace_and_join(policy):
    prompt, tails = tokens(12), tokens(6, 3).view(2, 3)
    state = DecodeState.empty(policy.config, 1, dtype=torch.float64)
    policy(prompt, state=state)
    forked = state.select(torch.tensor([0, 0]))
    logits = policy(tails, state=forked).logits
    for n in range(2):
        alone = policy(torch.cat([prompt, tails[n : n + 1]], 1)).logits[0, 12:]
        torch.testing.assert_close(logits[n], alone, atol=1e-11, rtol=1e-9)
    assert state.lengths.tolist() == [12]
    joined = DecodeState.cat([state, forked])
    joined.put(torch.tensor([1]), state)
    step = policy(tokens(3, 4).view(3, 1), state=joined).logits
    again = policy(tokens(3, 4)[:, 1:2], state=state).logits
    torch.testing.assert_close(step[1], again[0])


@torch.no_grad()
def test_rows_that_are_lent_continue_among_those_that_wait(policy):
    ids = tokens(5 * 12).view(5, 12)
    state = DecodeState.empty(policy.config, 5, dtype=torch.float64)
    policy(ids, state=state)
    near = partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)
    waiting = state.select(torch.tensor([2]))
    for rows, count in (([4, 0, 1], 1), ([3, 4], 30), ([0], 1)):  # 30 tokens make the cache grow
        index, more = torch.tensor(rows), tokens(len(rows) * count, count).view(len(rows), count)
        alone = state.select(index)
        expected = policy(more, state=alone).logits
        part = state.lend(index)
        near(policy(more, state=part).logits, expected)
        state.take_back(index, part)
        assert torch.equal(state.lengths[index], alone.lengths)
        again, also = (policy(more, state=s).logits for s in (state.select(index), alone))
        near(again, also)
    assert state.lengths.tolist() == [14, 13, 12, 42, 43]
    step = tokens(1, 9)
    expected = policy(step, state=waiting).logits
    near(policy(step, state=state.select(torch.tensor([2]))).logits, expected)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.float64, 1e-12)])
@torch.no_grad()
def test_a_matched_state_decodes_as_training_computes(policy, dtype, limit):
    """Pieces and steps over ends of chunks, with rows that fork, wait, are lent and joined."""
    narrow = copy.deepcopy(policy).to(dtype)

    def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
        assert float((found - wanted).norm() / wanted.norm()) < limit

    ids = torch.cat([tokens(40, seed) for seed in range(3)])
    ids[1, :18] = ids[0, :18]
    whole = narrow(ids).logits
    empty = partial(DecodeState.empty, policy.config, dtype=dtype, matched=True)
    state = empty(1)
    assert {type(layer) for layer in state.layers} == {ReplayedKda, LatentCache}
    near(narrow(ids[:1, :18], state=state).logits, whole[:1, :18])
    state = DecodeState.cat([state.select(torch.tensor([0, 0])), empty(1)])
    part, last = state.lend(torch.tensor([2])), torch.tensor([2])
    near(narrow(ids[2:, :18], state=part).logits[0], whole[2, :18])
    state.take_back(last, part)
    for t in range(18, 39):
        near(narrow(ids[:, t : t + 1], state=state).logits[:, 0], whole[:, t])
    state.put(torch.tensor([0]), state.select(last))
    near(narrow(ids[[2, 1, 2], 39:], state=state).logits[:, 0], whole[[2, 1, 2], 39])
    state = empty(2)
    row, bounds = torch.cat([ids[0, :9], ids[1]])[None], torch.tensor([0, 9, 49])
    near(narrow(row, bounds, state).logits[0], torch.cat([whole[0, :9], whole[1]]))


def test_state_memory_follows_the_tokens_stored(policy):
    state = DecodeState.empty(policy.config, 1, dtype=torch.float64)
    assert all(s.numel() == 0 for s in state.layers[3].tensors())
    policy(tokens(100), state=state)
    assert state.layers[3].tensors()[0].shape[1] <= 200


def test_chosen_logprobs_equal_those_of_all_logits(policy):
    ids, rows = tokens(30), torch.tensor([0, 4, 28])
    out = policy(ids, rows=rows, targets=ids[0, rows + 1], temperature=0.7)
    full = (policy(ids).logits[0] / 0.7).log_softmax(-1)
    assert out.logits is None
    torch.testing.assert_close(out.logprobs, full[rows, ids[0, rows + 1]])
    torch.testing.assert_close(out.entropy, -(full.exp() * full).sum(-1)[rows])


def test_last_only_gives_one_row_per_sequence(policy):
    ids, edges = tokens(30), torch.tensor([0, 10, 30])
    full = policy(ids, edges).logits[0]
    torch.testing.assert_close(policy(ids, edges, last_only=True).logits, full[[9, 29]])


def test_mla_ignores_the_order_of_earlier_tokens():
    """No positions: permuting keys inside the causal prefix leaves an MLA layer's output."""
    torch.manual_seed(1)
    layer = GatedMLA(PolicyConfig.tiny()).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    x = torch.randn(12, 64, dtype=torch.float64)
    packing = Packing.of((0, 12), torch.device("cpu"))
    order = torch.cat([torch.randperm(11), torch.tensor([11])])
    before, after = (layer(y, packing, None, None)[-1] for y in (x, x[order]))
    torch.testing.assert_close(before, after)


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor holds that an operation gives."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


@torch.no_grad()
def test_a_long_piece_on_a_long_cache_takes_bounded_memory(monkeypatch):
    """Pieces of 80 and 50 tokens after 300 cached ones; all scores at once are 486,400 numbers."""
    torch.manual_seed(2)
    layer = GatedMLA(PolicyConfig.tiny(num_attention_heads=8)).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    x, device = torch.randn(730, 64, dtype=torch.float64), torch.device("cpu")

    def prefill() -> tuple[torch.Tensor, int]:
        cache = LatentCache(torch.zeros(2, 0, 48, dtype=torch.float64))
        layer(x[:600], Packing.of((0, 300, 600), device), cache, torch.tensor([0, 0]))
        with Largest() as largest:
            pieces = Packing.of((0, 80, 130), device)
            out = layer(x[600:], pieces, cache, torch.tensor([300, 300]))
        return out, largest.numel

    whole, most = prefill()
    assert most == 2 * 80 * 8 * 380
    monkeypatch.setattr(attention, "MAX_SCORES", 1 << 16)
    parts, most = prefill()
    assert most <= 1 << 16
    torch.testing.assert_close(parts, whole, atol=1e-12, rtol=1e-12)


def test_thresholds_stay_fp32_and_in_place():
    policy = Policy(PolicyConfig.tiny())
    bias = policy.routers()[0].e_score_correction_bias
    bias += 1 / 3
    for convert in (policy.bfloat16, policy.half, policy.double, policy.float):
        convert()
        kept = policy.routers()[0].e_score_correction_bias
        assert kept.dtype == torch.float32
        assert torch.equal(kept, torch.full_like(kept, 1 / 3))
    address = policy.routers()[0].e_score_correction_bias.data_ptr()
    with policy.routing_statistics():
        policy(torch.randint(0, 512, (1, 64)))
    policy.update_thresholds()
    moved = policy.routers()[0].e_score_correction_bias
    assert moved.data_ptr() == address and not torch.equal(moved, torch.full_like(moved, 1 / 3))
    assert "model.layers.1.block_sparse_moe.gate.e_score_correction_bias" in policy.state_dict()


def test_thresholds_of_all_layers_move_at_once_or_not_at_all():
    policy = Policy(PolicyConfig.tiny())
    routers = policy.routers()
    assert len(routers) > 1
    with policy.routing_statistics():
        policy(torch.randint(0, 512, (1, 64)))
    histograms = [router.histogram for router in routers if router.histogram is not None]
    assert len(histograms) == len(routers)
    wanted = [histogram.solve() for histogram in histograms]
    loads = [float(router.load.max() / router.load.double().mean()) for router in routers]
    last = routers[-1].histogram
    routers[-1].clear()
    before = [router.e_score_correction_bias.clone() for router in routers]
    with pytest.raises(ValueError, match="no token was counted"):
        policy.update_thresholds()
    for router, kept in zip(routers, before, strict=True):
        assert torch.equal(router.e_score_correction_bias, kept)
    routers[-1].histogram = last
    assert policy.update_thresholds() == pytest.approx(loads, rel=1e-6)
    for router, bias in zip(routers, wanted, strict=True):
        assert torch.equal(router.e_score_correction_bias, bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_thresholds_are_fp32_in_a_policy_built_in_another_dtype(dtype):
    config = PolicyConfig.tiny(vocab_size=64, hidden_size=32)
    built = [Policy._from_config(config, dtype=dtype)]
    torch.set_default_dtype(dtype)
    try:
        built.append(Policy(config))
    finally:
        torch.set_default_dtype(torch.float32)
    for policy in built:
        assert policy.lm_head.weight.dtype == dtype
        assert {r.e_score_correction_bias.dtype for r in policy.routers()} == {torch.float32}


def test_only_forwards_inside_the_context_are_counted(policy):
    ids = tokens(50)
    policy.clear_routing_counts()
    before = {k: v.clone() for k, v in policy.state_dict().items()}
    policy(ids)
    policy(ids, rows=torch.tensor([1]), targets=torch.tensor([2])).logprobs.sum().backward()
    policy.zero_grad()
    assert all(int(count.sum()) == 0 for count in policy.routing_counts())
    assert all(torch.equal(v, before[k]) for k, v in policy.state_dict().items())
    policy.clear_routing_counts()
    valid = torch.arange(50) < 20
    with policy.routing_statistics(valid):
        policy(ids)
    histogram, seen, load = policy.routing_counts()[:3]
    assert int(seen) == 20 and int(load.sum()) == 40 and int(histogram.sum()) == 20 * 8
    policy.clear_routing_counts()


def test_counts_of_micro_batches_add_up(policy):
    ids = tokens(64)
    edges = torch.tensor([0, 16, 32, 48, 64])
    with policy.routing_statistics():
        policy(ids, edges)
    whole = [c.clone() for c in policy.routing_counts()]
    policy.clear_routing_counts()
    with policy.routing_statistics():
        for i in range(4):
            policy(ids[:, 16 * i : 16 * (i + 1)])
    assert all(torch.equal(a, b) for a, b in zip(whole, policy.routing_counts(), strict=True))
    policy.clear_routing_counts()


def test_labels_give_the_shifted_token_mean(policy):
    ids = tokens(20)
    labels = ids.clone()
    labels[0, :5] = -100
    logprobs = policy(ids).logits[0, :-1].log_softmax(-1)
    picked = logprobs.gather(-1, ids[0, 1:, None])[4:, 0]
    torch.testing.assert_close(policy(ids, labels=labels).loss, -picked.mean())
    packed = policy(ids, labels=labels, position_ids=torch.tensor([[*range(8), *range(12)]])).loss
    parts = [
        policy(ids[:, a:b]).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, a + 1 : b, None])[:, 0]
        for a, b in ((0, 8), (8, 20))
    ]
    torch.testing.assert_close(packed, -torch.cat([parts[0][4:], parts[1]]).mean())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]])}, "left padding"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0, 5, 5, 8])}, "cu_seqlens"),
        ({"input_ids": torch.tensor([[1, 10**6]])}, "input_ids has 1000000, expected 0 to"),
        ({"input_ids": torch.tensor([[1, -1]])}, "input_ids has -1, expected 0 to"),
        ({"labels": torch.tensor([[-100] * 7 + [10**6]])}, "labels has 1000000"),
        ({"rows": torch.tensor([8]), "targets": torch.tensor([1])}, "rows has 8, expected 0 to 7"),
        ({"rows": torch.tensor([1]), "targets": torch.tensor([-1])}, "targets has -1"),
    ],
)
def test_wrong_inputs_are_named(policy, arguments, named):
    with pytest.raises(ValueError, match=named):
        policy(**({"input_ids": tokens(8)} | arguments))


def test_structure_follows_the_published_rules():
    config = PolicyConfig.tiny(num_hidden_layers=9)
    kinds = [config.is_mla(i) for i in range(9)]
    assert kinds == [False, False, False, True] * 2 + [True]
    assert [config.is_dense(i) for i in range(3)] == [True, False, False]
    twice = (PolicyConfig.tiny().linear_attn_config or {}) | {"kda_layers": [1, 2, 2]}
    for change in (
        {"moe_renormalize": False},
        {"hidden_act": "relu"},
        {"linear_attn_config": twice},
    ):
        with pytest.raises(Exception, match=next(iter(change))):
            PolicyConfig.tiny(**change)


def test_config_round_trip_keeps_unknown_fields(tmp_path):
    config = PolicyConfig.tiny(some_future_field={"a": [1, 2]})
    config.save_pretrained(tmp_path)
    again = PolicyConfig.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict() and again.some_future_field == {"a": [1, 2]}


def test_weights_made_on_the_meta_device_are_all_drawn():
    with torch.device("meta"):
        policy = Policy(PolicyConfig.tiny(vocab_size=64))
        policy.v_head = ValueHead(64)
    policy = policy.to_empty(device="cpu")
    state = policy.state_dict()
    with torch.no_grad():
        for tensor in state.values():
            tensor.fill_(torch.nan)
    policy.apply(policy._init_weights)
    assert [name for name, tensor in state.items() if not bool(tensor.isfinite().all())] == []
    for name, tensor in state.items():
        if name.endswith(("norm.weight", "_res_proj.weight", "correction_bias")):
            assert bool((tensor == ("norm" in name)).all()), name
    assert not bool(state["v_head.summary.weight"].any())


def test_builds_on_the_meta_device():
    with torch.device("meta"):
        policy = Policy(PolicyConfig.tiny())
    assert all(p.is_meta for p in policy.parameters())


def test_pretrained_round_trip_keeps_every_bit(tmp_path):
    torch.manual_seed(3)
    policy = Policy(PolicyConfig.tiny(vocab_size=64, hidden_size=32))
    for router in policy.routers():
        router.e_score_correction_bias.normal_()
    policy.save_pretrained(tmp_path)
    again = Policy.from_pretrained(tmp_path)
    before, after = policy.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(
        torch.equal(before[k], after[k]) and before[k].dtype == after[k].dtype for k in before
    )


def test_training_and_decoding_choose_the_same_experts():
    """256 tokens in fp32: the packed forward, pieces and single steps route alike."""
    torch.manual_seed(4)
    policy = Policy(PolicyConfig.tiny(vocab_size=64, hidden_size=32))
    chosen: list[torch.Tensor] = []
    for router in policy.routers():
        router.e_score_correction_bias.normal_(0, 0.1)
        router.register_forward_hook(lambda _, __, out: chosen.append(out[0].sort(-1).values))
    ids = tokens(256)
    with torch.no_grad():
        policy(ids)
        trained, chosen = list(chosen), chosen[:0]
        state = DecodeState.empty(policy.config, 1)
        for piece in (ids[:, :100], *ids[:, 100:].split(1, 1)):
            policy(piece, state=state)
    layers = len(policy.routers())
    decoded = [torch.cat(chosen[i::layers]) for i in range(layers)]
    assert all(torch.equal(a, b) for a, b in zip(trained, decoded, strict=True))


def test_thresholds_are_added_not_subtracted():
    """C06: one token with scores 0.6, 0.5, 0.4, 0.3 and biases -0.3, 0, 0, 0.25 goes to 3 and 1."""
    policy = Policy(PolicyConfig.tiny(num_experts=4, num_experts_per_token=2))
    router = policy.routers()[0]
    scores = torch.tensor([0.6, 0.5, 0.4, 0.3])
    with torch.no_grad():
        router.weight.zero_()
        router.weight[:, 0] = scores.logit()
        router.e_score_correction_bias.copy_(torch.tensor([-0.3, 0, 0, 0.25]))
    x = torch.zeros(1, 64)
    x[0, 0] = 1
    experts, weights = router(x)
    assert experts.tolist() == [[3, 1]]
    torch.testing.assert_close(weights, torch.tensor([[0.375, 0.625]]))


def test_long_and_short_sequences_in_one_row_equal_alone(policy):
    lengths = [3, 90, 1, 30, 2, 44]
    ids, edges = tokens(sum(lengths)), torch.tensor([0, *lengths]).cumsum(0)
    packed = policy(ids, edges).logits[0]
    alone = [policy(piece).logits[0] for piece in ids.split(lengths, 1)]
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-11, rtol=1e-9)
    groups = Packing.of(tuple(edges.tolist()), torch.device("cpu")).by_length()
    assert sorted(t for index, _ in groups for t in index.tolist()) == list(range(sum(lengths)))
    for index, group in groups:
        assert group.num_sequences * group.longest < 2 * len(index)


def test_training_may_follow_inference_on_the_same_lengths(policy):
    """Index tables are cached per lengths; those made in inference mode must serve autograd."""
    ids, edges = tokens(73, 5), torch.tensor([0, 19, 73])
    with torch.inference_mode():
        policy(ids, edges)
    policy(ids, edges).logits.sum().backward()
    policy.zero_grad()


def test_index_tables_of_large_batches_end_with_their_forward():
    device = torch.device("cpu")
    short, long = (0, 40, 1000), (0, 40, 20_000)
    assert Packing.of(short, device) is Packing.of(short, device)
    packing = Packing.of(long, device)
    (tokens, group), (_, _) = packing.by_length()
    assert packing.by_length()[0][0] is tokens
    tables = [weakref.ref(t) for t in (packing.row, packing.offset, tokens, group.row)]
    del packing, tokens, group, _
    assert [table() for table in tables] == [None] * 4


def test_recomputed_layers_give_the_same_bits():
    """Checkpointing hands saved tensors to a backward pass once, and runs the forward again."""
    torch.manual_seed(3)
    policy = Policy(PolicyConfig.tiny(vocab_size=64))
    ids = torch.randint(64, (1, 600))
    edges = torch.tensor([0, 150, 600])

    def gradients(recomputed: bool) -> list[torch.Tensor]:
        policy.zero_grad()
        run = functools.partial(policy.model, ids, cu_seqlens=edges)
        hidden = (checkpoint(run, use_reentrant=False) if recomputed else run()).last_hidden_state
        hidden.square().sum().backward()
        return [p.grad.clone() for p in policy.parameters() if p.grad is not None]

    plain, again = gradients(False), gradients(True)
    assert len(plain) > 40
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
