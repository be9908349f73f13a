"""The worker as a process on a tiny random model: starts, runs, says why it cannot, and outlives its scheduler."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from quire.v1 import worker_pb2, worker_pb2_grpc
from quire_common.credit import Budget
from quire_common.errors import from_message
from quire_worker.config import WorkerConfig
from quire_worker.model_source import load_configured
from tests.fakes.worker.engine_bench import EngineBench, Told, a_start
from tests.fakes.worker.worker_server import FakeScheduler
from tests.model.folders import write_config
from tests.tiers import deep_after

WAIT_S = 120.0
MAX_LEN = 256
PROMPTS = {0: [5, 6, 7], 1: list(range(20, 60)), 2: [90] * 17}
FLAGS = ("--load-format", "dummy", "--seed", "3", "--torch-threads", "1", "--max-num-seqs", "4")
SIZES = ("--max-model-len", str(MAX_LEN), "--kv-cache-memory-bytes", str(4 << 20))
CHUNKED = Budget(tokens_per_step=24, prefill_tokens_beside_decoders=16, chunk_cap=16, partial_prefills=2)


class Process:
    """`python -m quire_worker` on a free port; its log lines are kept."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "quire_worker", "--listen", "127.0.0.1:0", *flags]
        self.child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[dict[str, object]] = []

    def until(self, message: str) -> dict[str, object]:
        assert self.child.stderr is not None
        for text in self.child.stderr:
            self.lines.append(json.loads(text))
            if self.lines[-1]["message"] == message:
                return self.lines[-1]
        raise AssertionError(f"no line {message!r}: {self.lines}")

    def address(self) -> str:
        return str(self.until("listening")["address"])

    def end(self) -> int:
        _, rest = self.child.communicate(timeout=WAIT_S)
        self.lines += [json.loads(text) for text in rest.splitlines()]
        return self.child.returncode


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def worker(folder: Path) -> Iterator[str]:
    process = Process("--model", str(folder), "--served-model-name", "tiny", *FLAGS, *SIZES)
    address = process.address()
    with grpc.insecure_channel(address) as channel:
        load = worker_pb2_grpc.WorkerStub(channel).Load(worker_pb2.LoadRequest(model="tiny"), timeout=WAIT_S)
        assert list(load)[-1].phase == "ready"
    yield address
    process.child.send_signal(signal.SIGTERM)
    assert process.end() == 0
    assert process.lines[-1]["message"] == "stopped"


def starts() -> list[object]:
    return [
        a_start(s, p, list(range(1 + 8 * s, 9 + 8 * s)), max_tokens=40, ignore_eos=True, max_model_len=MAX_LEN, key=s)
        for s, p in PROMPTS.items()
    ]


def in_process(folder: Path) -> dict[int, list[int]]:
    """The same requests, driven without gRPC."""
    config = WorkerConfig(
        model=str(folder), load_format="dummy", seed=3, max_num_seqs=4, max_model_len=MAX_LEN,
        kv_cache_memory_bytes=4 << 20,
    )  # fmt: skip
    loaded = load_configured(config, lambda phase, done, total: None)
    spec = loaded.engine_spec(config.sequences_on("cpu"))
    bench = EngineBench(spec, device=lambda counting: loaded.make_device(spec, True))
    bench.grant(*starts())  # type: ignore[arg-type]  # Starts
    return bench.run().tokens


def test_worker_process_matches_the_engine_in_process(worker: str, folder: Path) -> None:
    told = Told()
    with grpc.insecure_channel(worker) as channel:
        scheduler = FakeScheduler(worker_pb2_grpc.WorkerStub(channel))
        assert scheduler.attach().model.name == "tiny"
        scheduler.grant(start=starts(), budget=CHUNKED)
        while len(told.finish) < len(PROMPTS):
            told.add(scheduler.next_report())
        scheduler.half_close()
    assert told.errors == [] and all(len(tokens) == 40 for tokens in told.tokens.values())
    assert told.tokens == in_process(folder)


SCHEDULER = textwrap.dedent(
    """
    import sys, grpc
    from quire.v1 import worker_pb2_grpc
    from tests.fakes.worker.engine_bench import LOCKSTEP, a_start
    from tests.fakes.worker.worker_server import FakeScheduler
    channel = grpc.insecure_channel(sys.argv[1])
    scheduler = FakeScheduler(worker_pb2_grpc.WorkerStub(channel))
    scheduler.attach()
    scheduler.grant(start=[a_start(0, [5, 6, 7], [1, 2, 3])], budget=LOCKSTEP)
    assert scheduler.next_report().running == 1
    print("running", flush=True)
    sys.stdin.read()
    """
)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_slots_of_a_dead_or_hanging_scheduler_are_freed(worker: str, number: signal.Signals) -> None:
    root = Path(__file__).resolve().parents[3]
    child = subprocess.Popen(
        [sys.executable, "-c", SCHEDULER, worker],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    try:
        assert child.stdout is not None and child.stdout.readline() == "running\n"
        with grpc.insecure_channel(worker) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            before = stub.GetStatus(worker_pb2.GetStatusRequest())
            assert before.running == 1
            child.send_signal(number)
            poll, status = threading.Event(), before
            for _ in range(int(WAIT_S * 20)):
                status = stub.GetStatus(worker_pb2.GetStatusRequest())
                if status.epoch.run > before.epoch.run:
                    break
                poll.wait(0.05)
            assert (status.epoch.run, status.running) == (before.epoch.run + 1, 0)
    finally:
        child.kill()
        child.communicate(timeout=WAIT_S)


@pytest.mark.parametrize(
    ("flags", "code"),
    deep_after(
        2,
        [
            (("--model", "{tmp}/nothing"), "MODEL_NOT_FOUND"),
            ((), "MODEL_MISSING"),
            (("--model", "{folder}"), "MISSING_WEIGHTS"),
            (
                ("--model", "{folder}", "--load-format", "dummy", "--kv-cache-memory-bytes", "1000"),
                "KV_CACHE_TOO_SMALL",
            ),
            (("--model", "{folder}", "--kv-cache-memory-bytes", "1000000000000000"), "KV_CACHE_TOO_LARGE"),
        ],
    ),
)
def test_unservable_model_is_named_at_the_start(
    tmp_path: Path, folder: Path, flags: tuple[str, ...], code: str
) -> None:
    process = Process(*(flag.format(tmp=tmp_path, folder=folder) for flag in flags))
    assert process.end() == 2
    assert process.lines[-1]["code"] == code and process.lines[-1]["fix"]


@pytest.mark.deep
def test_watchers_are_told_before_the_process_ends(folder: Path) -> None:
    process = Process("--model", str(folder), "--load-format", "dummy", "--max-model-len", "100000")
    with grpc.insecure_channel(process.address()) as channel:
        watched = worker_pb2_grpc.WorkerStub(channel).Load(worker_pb2.LoadRequest(), timeout=WAIT_S)
        assert from_message(list(watched)[-1].error).code == "MAX_MODEL_LEN_TOO_LARGE"
    assert process.end() == 2
    assert process.lines[-1]["code"] == "MAX_MODEL_LEN_TOO_LARGE"


@pytest.mark.deep
@pytest.mark.parametrize("flags", [("--max-num-seqs", "-1"), ("--load-format", "pickle"), ("--dtype", "int8")])
def test_a_bad_flag_is_named(flags: tuple[str, str]) -> None:
    process = Process(*flags)
    assert process.end() == 2
    assert process.lines[-1]["code"] == "BAD_VALUE" and flags[0] in str(process.lines[-1]["error"])
