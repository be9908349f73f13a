"""`quire demo-pd` shows pages that travel, and leaves no process and no interface, whether it ends or is ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.errors import FailedPrecondition
from quire.local.private_network import PrivateNetwork
from tests.pipeline.leftovers import processes_with

pytestmark = pytest.mark.slow
LIMIT_S = 240.0
# Of the processes of one demonstration.
MARK = "QUIRE_TEST_DEMO"


def interfaces() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


def start(name: str, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "quire", "demo-pd", "--prefill=1", "--decode=1", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, MARK: name})


def is_allowed() -> bool:
    try:
        PrivateNetwork([]).close()
    except FailedPrecondition:
        return False
    return True


@pytest.mark.parametrize("where", ["--netns", "--no-netns"])
def test_demo_shows_transferred_pages_and_leaves_nothing(where: str) -> None:
    if where == "--netns" and not is_allowed() and os.environ.get("CHAOS_NO_NAMESPACES"):
        pytest.skip("network namespaces are not allowed here")
    before = interfaces()
    with start(where, where, "--requests=2", "--max-tokens=4") as demo:
        text = demo.communicate(timeout=LIMIT_S)[0]
    assert demo.returncode == 0, text
    rows = re.findall(r"^ +\d+ +\d+  prefill-1 +decode-1 +(\d+) +[0-9.]+ MiB  (\w+) ", text, re.MULTILINE)
    assert len(rows) == 2 and all(int(pages) > 10 for pages, _ in rows), text
    assert {way for _, way in rows} <= ({"tcp"} if where == "--netns" else {"shm", "tcp"})
    assert "no process, namespace or interface is left" in text
    assert interfaces() == before and not processes_with(MARK, where)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_interrupted_demo_leaves_nothing(number: signal.Signals) -> None:
    before = interfaces()
    with start(number.name, "--netns" if is_allowed() else "--no-netns") as demo:
        assert demo.stdout is not None
        while "ready" not in demo.stdout.readline():
            assert demo.poll() is None
        demo.send_signal(number)
        demo.wait(LIMIT_S)
    deadline = time.monotonic() + LIMIT_S
    while interfaces() != before or processes_with(MARK, number.name):
        assert time.monotonic() < deadline, f"left: {interfaces() - before}, {processes_with(MARK, number.name)}"
        time.sleep(0.1)
