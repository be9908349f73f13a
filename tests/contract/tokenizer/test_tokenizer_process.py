"""The tokenizer as a process: how it starts, what it weighs, how it stops."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from quire.v1 import tokenizer_pb2 as pb
from quire.v1 import tokenizer_pb2_grpc
from quire_common.columns import i32, pack_i32
from tests.unit.tokenizer import folders

MAX_MIB = 120
MAX_START_S = 3.0
GENEROUS_S = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folders.write_folder(tmp_path / "tiny")


class Running:
    """A tokenizer process that said it is ready."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.address = str(self.until("listening")["address"])
        self.until("ready")

    def until(self, message: str) -> dict[str, object]:
        """The first log line from here on that says so."""
        assert self.process.stderr is not None
        for text in self.process.stderr:
            line: dict[str, object] = json.loads(text)
            if line["message"] == message:
                return line
        raise AssertionError(f"the process ended before it said {message!r}")


@contextmanager
def running(folder: Path) -> Iterator[Running]:
    command = [sys.executable, "-m", "quire_tokenizer", "--model", str(folder)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield Running(process)
        finally:
            process.kill()


def test_tokenizer_process_is_light_and_starts_fast(folder: Path) -> None:
    """Start is measured in CPU seconds: the machine that runs the tests has other work."""
    with running(folder) as tokenizer, grpc.insecure_channel(tokenizer.address) as channel:
        stub = tokenizer_pb2_grpc.TokenizerStub(channel)
        assert stub.GetTokenizerInfo(pb.GetTokenizerInfoRequest(), timeout=GENEROUS_S).model == "tiny"
        proc = Path("/proc") / str(tokenizer.process.pid)
        fields = (proc / "stat").read_text().rpartition(")")[2].split()
        cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        resident = int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        assert cpu_s < MAX_START_S
        assert resident < MAX_MIB << 20
        tokenizer.process.send_signal(signal.SIGTERM)
        assert tokenizer.process.wait(GENEROUS_S) == 0


def test_sigterm_waits_for_open_requests_and_not_for_idle_streams(folder: Path) -> None:
    requests: queue.Queue[pb.DetokenizeRequest] = queue.Queue()
    with running(folder) as tokenizer, grpc.insecure_channel(tokenizer.address) as channel:
        answers = tokenizer_pb2_grpc.TokenizerStub(channel).Detokenize(iter(requests.get, None))
        requests.put(pb.DetokenizeRequest(open=[pb.DetokenizeOpen(handle=1)]))
        next(answers)
        tokenizer.process.send_signal(signal.SIGTERM)
        tokenizer.until("stopping")
        another = pb.DetokenizeRequest(open=[pb.DetokenizeOpen(handle=2)], close=pack_i32([2]))
        requests.put(another)
        while not (refused := next(answers)).errors:  # the signal was seen, the drain may not have begun
            requests.put(another)
        assert refused.errors[0].error.code == "TOKENIZER_DRAINING"
        assert tokenizer.process.poll() is None
        requests.put(pb.DetokenizeRequest(handle=pack_i32([1]), count=pack_i32([0]), finish=b"\x02"))
        assert i32(next(answers).handle).tolist() == [1]
        # The stream is still open; waiting for it would take the drain's 30 s.
        assert tokenizer.process.wait(28.0) == 0


@pytest.mark.parametrize(("arguments", "code"), [([], "MODEL_REQUIRED"), (["--model", "/nowhere"], "MODEL_NOT_FOUND")])
def test_failed_tokenizer_start_names_its_cause(arguments: list[str], code: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "quire_tokenizer", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        timeout=GENEROUS_S,
        check=False,
    )
    assert run.returncode == 2
    headline = json.loads(run.stderr.splitlines()[-1])
    assert headline["code"] == code
    assert headline["fix"]
