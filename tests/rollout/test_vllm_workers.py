"""An engine over several processes: each has its part of the weights proven, or all go back."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from farhorizon.configs.errors import RunFailed, UserError
from farhorizon.configs.schema import ChatConfig, RolloutConfig, VllmConfig
from farhorizon.policy.links import loopback_interface
from farhorizon.policy.weights import Bucket, WeightManifest
from farhorizon.rollout.engine_weights import EngineWeights
from farhorizon.rollout.engines import build
from farhorizon.rollout.memory import one_line
from farhorizon.rollout.shelf import Shelf
from farhorizon.rollout.sync import WeightReceiver
from farhorizon.rollout.vllm import VllmEngine
from farhorizon.rollout.vllm_workers import (
    ENDING,
    EXTENSION,
    WorkerExtension,
    Workers,
    on_loopback,
)

from ..syncing import TRANSPORTS, receive
from .fake_engine import BIAS, SHAPES, logprobs, publish, state
from .part_worker import ROWS, tell

OLD, NEW, COUNT = state(0), state(1), 2


class Processes:
    """The workers, called as vLLM's executor for several processes calls its own."""

    def __init__(self, count: int) -> None:
        script = str(Path(__file__).with_name("part_worker.py"))
        self.each = [
            subprocess.Popen(
                [sys.executable, script, str(rank), str(count)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for rank in range(count)
        ]
        self.failed: Callable[[], None] | None = None
        self.is_failed = False

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        self.failed = callback

    def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        for process in self.each:
            assert process.stdin is not None
            tell(process.stdin, (method, tuple(args)))
        return [pickle.load(process.stdout) for process in self.each if process.stdout is not None]

    def close(self) -> None:
        for process in self.each:
            process.communicate()


class Engine(Workers):
    """`WeightEngine` of the processes."""

    def __init__(self, processes: Processes) -> None:
        super().__init__(processes, "rollout.vllm.memory=0.9")
        self.processes = processes

    def served(self) -> dict[str, torch.Tensor]:
        """The policy that they compute together."""
        parts = self.processes.collective_rpc("served")
        whole: dict[str, torch.Tensor] = {}
        for name in SHAPES:
            own = [torch.from_numpy(part[name]) for part in parts]
            whole[name] = torch.cat(own) if name in ROWS else own[0]
            assert name in ROWS or all(torch.equal(one, own[0]) for one in own)
        turned = [torch.from_numpy(part["turned"]).T for part in parts]
        return whole | {"v_proj.weight": torch.cat(turned)}

    def score(self, token_ids: np.ndarray, temperature: float) -> np.ndarray:
        return logprobs(self.served(), temperature)


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    started = Processes(COUNT)
    yield started
    started.close()


@pytest.fixture
def engine(processes: Processes) -> Engine:
    processes.collective_rpc("build", [SHAPES])
    made = Engine(processes)
    made.load(OLD)
    return made


def holder(engine: Engine, folder: Path) -> WeightReceiver:
    save_file(OLD, folder / "model.safetensors")
    return WeightReceiver(EngineWeights(engine, folder, WeightManifest.of(OLD), dict))


def same(served: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(served[name], weights[name]) for name in weights)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_worker_takes_its_part(engine: Engine, tmp_path: Path, transport: str) -> None:
    receiver = holder(engine, tmp_path)
    for number in (1, 2, 3):
        weights = state(number)
        receive(receiver, publish(weights, number), transport)
        assert receiver.version is not None and receiver.version.number == number
        assert same(engine.served(), weights)
        assert engine.difference(weights) is None


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("skipped", f"{BIAS}: served, but no weight was loaded into it"),
        ("rounded", f"{BIAS}: served in bfloat16, which rounds it"),
        ("derived", "turned: served, but no weight was loaded into it"),
        ("stale", "turned: what is served is not what the weights give"),
        ("broken", "vllm: loading weights ran out of memory .* lower rollout.vllm.memory"),
    ],
)
@pytest.mark.parametrize("rank", range(COUNT))
@pytest.mark.parametrize("earlier", [False, True])
def test_one_worker_that_differs_is_named_and_all_go_back(
    engine: Engine, tmp_path: Path, fault: str, named: str, rank: int, earlier: bool
) -> None:
    receiver = holder(engine, tmp_path)
    if earlier:
        receive(receiver, publish(state(7), 1))
    before = engine.served()
    engine.processes.collective_rpc("spoil", [rank, fault])
    if fault == "rounded":  # which no load undoes
        with pytest.raises(RunFailed, match=rf"not served again \(worker {rank} of 2: {named}"):
            receive(receiver, publish(NEW, 5))
        return
    with pytest.raises(RunFailed, match=f"worker {rank} of 2: {named}"):
        receive(receiver, publish(NEW, 5))
    assert same(engine.served(), before)
    receive(receiver, publish(NEW, 6))
    assert same(engine.served(), NEW)


def test_memory_that_another_process_lacks_is_told_as_of_this_one() -> None:
    """Of what a step raises there vLLM gives the text."""
    told = "Worker failed with error 'CUDA out of memory. Tried to allocate', please check the"
    with (
        pytest.raises(RunFailed, match=r"^vllm: a step ran out of memory"),
        one_line("a step", "sizes"),
    ):
        raise RuntimeError(told)


@pytest.mark.parametrize(
    ("size", "named"),
    [
        (1, None),
        (2, None),
        (4, r"linear_attn_config\.num_heads=2$"),
        (3, r"hidden_size=32, num_attention_heads=.*, moe_intermediate_size=\d+$"),
    ],
)
def test_a_policy_that_cannot_be_divided_is_refused(
    tiny_checkpoint: Path, size: int, named: str | None
) -> None:
    config = RolloutConfig(engine="vllm", gpus=size, vllm=VllmConfig(tensor_parallel=size))
    wanted = rf"^rollout\.vllm\.tensor_parallel={size} must divide the policy's .*{named}"
    missing = "vllm cannot be imported here"  # which is looked for after that
    with pytest.raises(UserError, match=wanted if named else missing):
        build(str(tiny_checkpoint), config, 64, 0, ChatConfig())


def test_log_probs_of_prompts_are_tempered_on_each(engine: Engine) -> None:
    """Where there are any: vLLM gathers them on the first."""
    engine.temper(4.0)
    assert engine.processes.collective_rpc("logits") == [[0.25, 0.25], None]
    engine.temper(None)
    assert engine.processes.collective_rpc("logits") == [[1.0, 1.0], None]


def test_a_lost_worker_ends_the_process_of_its_engine(engine: Engine) -> None:
    """vLLM calls what is registered when one of its processes has gone."""
    failed = engine.processes.failed
    assert failed is not None
    child = os.fork()
    if child == 0:
        failed()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_what_fails_with_a_worker_is_not_told_before_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or the run would stop with that, instead of starting the actor again."""
    waited: list[float] = []
    monkeypatch.setattr("farhorizon.rollout.vllm_workers.time.sleep", waited.append)
    processes = Processes(0)
    workers = Workers(processes, "")
    workers.heed_loss()
    assert waited == []
    processes.is_failed = True
    workers.heed_loss()
    assert waited == [ENDING]


@pytest.mark.parametrize("size", [1, 2])
def test_vllm_is_told_of_several_gpus_alone(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    told: dict[str, Any] = {}
    executor = Processes(0)
    core = SimpleNamespace(scheduler=None, model_executor=executor)
    worker = SimpleNamespace(get_model=lambda: torch.nn.Module())
    engine = SimpleNamespace(
        engine_core=SimpleNamespace(engine_core=core), collective_rpc=lambda call: [call(worker)]
    )

    def start(arguments: dict[str, Any]) -> SimpleNamespace:
        told.update(arguments, interface=os.environ.get("NCCL_SOCKET_IFNAME"))
        return engine

    fake = SimpleNamespace(EngineArgs=dict, LLMEngine=SimpleNamespace(from_engine_args=start))
    monkeypatch.setattr("farhorizon.rollout.vllm.import_vllm", lambda: fake)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    VllmEngine(tiny_checkpoint, 64, tensor_parallel=size)
    names = ("tensor_parallel_size", "distributed_executor_backend", "worker_extension_cls")
    own = [told.get(name) for name in (*names, "interface")]
    assert own == ([2, "mp", EXTENSION, loopback_interface()] if size > 1 else [None] * 4)
    assert (executor.failed is None) == (size == 1)


def test_vllm_finds_the_extension_by_its_name() -> None:
    """And no name in it that a worker of vLLM might have, which it would refuse."""
    module, _, name = EXTENSION.rpartition(".")
    assert getattr(sys.modules[module], name) is WorkerExtension
    own = [n for n in vars(WorkerExtension) if not n.startswith("__")]
    assert own and all("farhorizon" in n for n in own)


def test_workers_talk_on_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    with on_loopback():
        assert [os.environ.get(name) for name in names] == [loopback_interface()] * 2
    assert [os.environ.get(name) for name in names] == ["eth7", None]


def test_memory_on_the_shelf_is_read_and_not_written() -> None:
    shelf = Shelf()
    flat = torch.arange(12, dtype=torch.float32)
    held = shelf.put(flat.view(torch.uint8)).view(torch.float32)
    given = {"part": held[4:8].view(2, 2), "other": torch.ones(3, dtype=torch.bfloat16)}
    with shelf.shown(given | {"none": torch.empty(0, 4)}) as shown:
        found = pickle.loads(pickle.dumps(shown)).open()
        assert found["part"].tolist() == [[4, 5], [6, 7]] and found["part"].dtype == torch.float32
        assert found["other"].tolist() == [1, 1, 1] and found["other"].dtype == torch.bfloat16
        assert found["none"].shape == (0, 4)
        held[4] = 9  # one memory, which the reader cannot change
        found["part"][1, 1] = 0
        assert found["part"].tolist() == [[9, 5], [6, 0]] and held[7] == 7


def test_the_shelf_keeps_no_more_than_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farhorizon.rollout.shelf.FILE", 4096)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    shelf = Shelf()
    held = [shelf.put(torch.full((1000,), n, dtype=torch.uint8)) for n in range(8)]
    assert len(shelf._files) == 2  # four in each
    big = shelf.put(torch.arange(5000).to(torch.uint8))
    for n in range(8, 100):
        held = [*held[1:], shelf.put(torch.full((1000,), n, dtype=torch.uint8))]
        assert [int(one[999]) for one in held] == list(range(n - 7, n + 1))
        assert len(shelf._files) <= 4
    assert torch.equal(big, torch.arange(5000).to(torch.uint8))
    del held, big
    gc.collect()
    assert len(shelf._files) == 0 and len(os.listdir("/proc/self/fd")) == before


def test_a_bucket_on_the_shelf_is_what_came() -> None:
    workers = Workers(Processes(0), "")
    bucket = Bucket(3, 2, torch.arange(48, dtype=torch.uint8))
    taken = workers.take(bucket)
    assert (taken.first, taken.count) == (3, 2) and torch.equal(taken.payload, bucket.payload)
    assert workers.take(Bucket(0, 0, torch.empty(0, dtype=torch.uint8))).payload.numel() == 0
