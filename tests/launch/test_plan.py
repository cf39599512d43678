"""`plan`: what it reads, what it prints, and that the numbers are those of the arithmetic."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from farhorizon.configs.schema import PlanConfig
from farhorizon.launch import cli
from farhorizon.launch.plan import Fit, Trained, learner_fit, rollout_fit
from farhorizon.policy.count import Counts, StateSizes

GIB = 2**30


def counts(total: int) -> Counts:
    return Counts({"output head": total}, total, 0)


def test_batch_and_context_fill_what_weights_leave() -> None:
    # 10 GiB of which 1 is free; weights of 2 bytes each take 4 of the 9
    config = PlanConfig(gpu_gib=10, reserve=0.1, batch=4)
    sizes = StateSizes(fixed=GIB // 4, per_token=2**20)
    fit, weights = rollout_fit(config, counts(2 * GIB), sizes, context=768)
    assert weights == 4 * GIB
    assert fit == Fit(batch=5, context=1024)  # 1 GiB a sequence; (5/4 - 1/4) GiB of tokens
    shared = PlanConfig(gpu_gib=10, reserve=0.1, batch=4, serve_gpus=4)
    assert rollout_fit(shared, counts(2 * GIB), sizes, 768) == (Fit(8, 1792), GIB)
    assert rollout_fit(config, counts(5 * GIB), sizes, 768)[0] == Fit(0, 0)
    assert rollout_fit(config, counts(GIB), StateSizes(GIB, 0), 768)[0] == Fit(7, None)


def test_a_rank_trains_what_its_states_leave() -> None:
    config = PlanConfig(gpu_gib=20, reserve=0.1, ranks=4, batch=2)  # 18 GiB
    # 1 Gi parameters: 16 GiB without ZeRO, 11 at 1, 8 at 2, 5 at 3
    fits = [learner_fit(config, Trained(GIB), 2**20, 1024, stage) for stage in range(4)]
    assert fits == [Fit(2, 1024), Fit(7, 3584), Fit(10, 5120), Fit(13, 6656)]
    assert learner_fit(config, Trained(2 * GIB), 2**20, 1024, 0) == Fit(0, 0)


def test_divided_experts_and_one_moment_leave_more() -> None:
    config = PlanConfig(gpu_gib=20, reserve=0.1, ranks=4, expert_parallel=2)  # 18 GiB
    # 1 Gi parameters, half of them experts, of which a rank holds half: 16 bytes of 3/4 Gi
    half = Trained(GIB, experts=GIB // 2)
    assert half.sizes(config, 0).total == 12 * GIB
    # weights and gradients of 3/4 Gi, two moments and masters of a quarter
    assert half.sizes(config, 1).total == 2 * 3 * GIB + 3 * GIB
    assert half.sizes(config, 2).total == 3 * GIB + GIB + 3 * GIB
    alone = PlanConfig(gpu_gib=20, reserve=0.1, ranks=4)
    muon = Trained(GIB, experts=GIB // 2, muon=3 * GIB // 4)
    assert muon.sizes(alone, 0).total == 16 * GIB - 3 * GIB
    assert muon.sizes(alone, 3).total == 5 * GIB - 3 * GIB // 4
    # experts are all Muon's: of 3/4 Gi parameters a half
    assert muon.sizes(config, 0).total == 12 * GIB - 2 * GIB


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_k3_in_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "k3")
    assert "93: 69 KDA + 24 MLA; 92 with 896 experts, 16 per token" in out
    assert "2.7795 T total, 104.2 B active" in out
    assert re.search(r"cache +27,648 B  per token", out)
    assert re.search(r"sequence +27\.4. GiB  at 1,048,576 tokens", out)
    # 5.56 TB in bfloat16 on GPUs of 72 usable GiB
    # beside a whole context of 27.4 GiB, and with room for exactly that
    assert "the weights do not fit: serve_gpus=117 at least, with a sequence of 1,048,576" in out
    assert re.search(r"largest batch +1  sequences", run(capsys, "k3", "serve_gpus=117"))
    # room of 92 MiB, a state of 428
    out = run(capsys, "k3", "serve_gpus=72", "context=1024")
    assert "the weights fit, but not a sequence of 1,024 tokens beside them: serve_gpus=73" in out
    out = run(capsys, "k3", "gpu_gib=20")
    assert "a GPU holds no sequence of 1,048,576 tokens: lower context" in out
    out = run(capsys, "k3", "serve_gpus=128", "context=65536")
    assert re.search(r"largest batch +\d+  sequences of 65,536 tokens", out)
    # 3 x 4 bytes of 2.7795e12 parameters over 8 ranks, in GiB
    assert re.search(r"  1 +10,354\.\d+ +10,354\.\d+ +3,882\.\d+", out)


def test_the_settings_of_a_learner_count(capsys: pytest.CaptureFixture[str]) -> None:
    def rows(*settings: str) -> tuple[str, list[list[float]]]:
        out = run(capsys, "small", "ranks=4", "context=1024", *settings)
        learner = out[out.index("learner ") :].splitlines()
        cells = [line.replace(",", "").split() for line in learner[3:]]
        return "\n".join(learner[:2]), [list(map(float, row)) for row in cells]

    head, plain = rows()
    assert "AdamW, fp32 masters, 4 ranks; GiB on each" in head and len(plain) == 4
    head, divided = rows("expert_parallel=2")
    assert "4 ranks, experts over 2 of them" in head
    assert [row[0] for row in divided] == [0, 1, 2]
    assert divided[0][4] < plain[0][4] and divided[2][3] == plain[2][3]
    head, muon = rows("optimizer=muon")
    assert "Muon, fp32 masters" in head
    assert all(a[3] < b[3] and a[1:3] == b[1:3] for a, b in zip(muon, plain, strict=True))
    assert len(rows("optimizer=muon", "expert_parallel=2")[1]) == 1
    head, again = rows("checkpointing=layers")
    assert "per token, layers computed again" in head
    assert all(a[1:5] == b[1:5] for a, b in zip(again, plain, strict=True))
    assert all(a[5] > 2 * b[5] and a[6] > 2 * b[6] for a, b in zip(again, plain, strict=True))


def test_presets_folders_and_files_are_read(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(capsys, str(tiny_checkpoint))
    assert " at 512 tokens" in folder
    assert run(capsys, str(tiny_checkpoint / "config.json")) == folder
    fields = json.loads((tiny_checkpoint / "config.json").read_text())
    nested = tmp_path / "nested.json"
    nested.write_text(json.dumps({"model_type": "kimi_k3", "text_config": fields}))
    assert run(capsys, str(nested)) == folder
    assert "images" not in folder
    assert " at 8,192 tokens" in run(capsys, "small")


def test_a_vision_tower_is_listed_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = json.loads((Path(__file__).parents[2] / "configs/policy/k3.json").read_text())
    nested = tmp_path / "k3.json"
    nested.write_text(
        json.dumps({"model_type": "kimi_k3", "text_config": text, "vision_config": {}})
    )
    seeing = run(capsys, str(nested), "ranks=8").splitlines()
    alone = run(capsys, "k3", "ranks=8").splitlines()
    # 447,358,976 parameters; 2 bytes each in rollouts, 16 without ZeRO, 2.5 at its stage 3
    assert [line.split() for line in seeing if line not in alone] == [
        ["with", "images", "447.4", "M", "more,", "on", "top", "of", "what", "follows"],
        ["vision", "tower", "401.2", "M"],
        ["projector", "46.14", "M"],
        ["rollout", "weights", "853.27", "MiB"],
        ["learner,", "ZeRO", "0", "6.67", "GiB"],
        ["learner,", "ZeRO", "1", "3.96", "GiB"],
        ["learner,", "ZeRO", "2", "2.50", "GiB"],
        ["learner,", "ZeRO", "3", "1.04", "GiB"],
    ]
    assert [line for line in seeing if line in alone] == alone


def test_a_small_policy_is_counted_in_smaller_units(capsys: pytest.CaptureFixture[str]) -> None:
    # 16 bytes of 292,956 parameters without ZeRO
    out = run(capsys, "tiny")
    assert "8 ranks; MiB on each" in out
    assert re.search(r"\n  0 +1\.12 +1\.12 +2\.24 +4\.47 ", out)


def test_only_the_policy_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan"])
    assert capsys.readouterr().err.endswith("arguments are required: POLICY\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch"], "policy nosuch: no such folder; presets: 1b, 3b, k3"),
        (["k3", "gpu_gib=0"], "gpu_gib=0.0 must be above 0"),
        (["k3", "reserve=1"], "reserve=1.0 must be at least 0 and below 1"),
        (["k3", "expert_parallel=3"], "expert_parallel=3 must divide ranks=8"),
        (
            ["small", "ranks=96", "expert_parallel=32"],
            "expert_parallel=32 must divide the policy's 16 experts",
        ),
        (["k3", "rank=2"], "unknown key rank on the command line; did you mean ranks?"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"farhorizon: {message}") and captured.err.count("\n") == 1
    assert captured.out == ""
