"""Threads that wait for work leave the cores to others: in a process that begins as a worker does."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from quire_worker import __main__ as worker
from quire_worker.config import WorkerConfig
from quire_worker.threads.waiting import DEFAULTS, limit_spinning

PROGRAM = """
import statistics, sys, time
from quire_worker import __main__ as worker
from quire_worker.config import WorkerConfig

if sys.argv[1] == "worker":
    worker.run_sync = lambda config, make: 0  # what is said before the life of a service begins
    assert worker._run(WorkerConfig()) == 0
assert "torch" not in sys.modules, "torch has read the environment already"
import torch

torch.set_num_threads(2)  # with more threads than cores, GNU's OpenMP hardly spins
x = torch.randn(256, 256)
x @ x
waiting = []
for _ in range(40):
    began = time.process_time()
    x @ x
    time.sleep(0.03)
    waiting.append(time.process_time() - began)
print(statistics.median(waiting))
"""


def _waiting_s(kind: str) -> float:
    """Processor time of each small product and of 30 ms after it, in which there is nothing to do."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
    command = [sys.executable, "-c", PROGRAM, kind]
    return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


@pytest.mark.perf
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="threads of one core do not spin")
def test_idle_worker_threads_sleep_soon() -> None:
    """On a busy machine a turn of the loop that spins may be cut short, so there are several attempts."""
    found = [(_waiting_s("worker"), _waiting_s("plain")) for _ in range(3)]
    assert min(worker for worker, _ in found) < 0.6 * max(plain for _, plain in found), found


def test_environments_thread_settings_stay() -> None:
    said = {"OMP_WAIT_POLICY": "PASSIVE"}
    limit_spinning(said)
    assert said == {"OMP_WAIT_POLICY": "PASSIVE"}
    empty: dict[str, str] = {}
    limit_spinning(empty)
    assert empty == DEFAULTS


def test_a_worker_says_how_threads_wait_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, str] = {}
    monkeypatch.setattr(worker, "os", SimpleNamespace(environ=said))
    monkeypatch.setattr(worker, "run_sync", lambda config, make: len(said))
    assert worker._run(WorkerConfig()) == len(DEFAULTS) > 0
    assert said == DEFAULTS
