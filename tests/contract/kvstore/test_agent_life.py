"""The KV transfer agent process lives and dies: restarts, signals, orphans, leaks, and what it must not import."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from bench import ROOT
from bench.harness.process_cpu import cpu_s
from quire_common.credit import MoveKind
from quire_common.telemetry import metrics
from quire_worker.kv_transfer.agent_process import COMMAND
from quire_worker.kv_transfer.wire import AgentFrameKind
from quire_worker.side_process.frames import Frame
from tests.fakes.kv_transfer.agent_rig import EMPTY, QUICK, WAIT_S, AgentRig, body, load, store
from tests.tiers import deep_after


def restarts() -> float:
    return metrics.registry.get_sample_value("quire_worker_mover_restarts_total") or 0.0


def pid_of(rig: AgentRig) -> int:
    """The process, once it has started."""
    clock = threading.Event()
    for _ in range(int(WAIT_S * 100)):
        if rig.transfer_agent.pid is not None:
            return rig.transfer_agent.pid
        clock.wait(0.01)
    raise AssertionError("no process came")


def fds() -> set[str]:
    return {f"{entry.name} {entry.readlink()}" for entry in Path("/proc/self/fd").iterdir() if entry.exists()}


def await_end(pidfd: int) -> None:
    assert select.select([pidfd], [], [], WAIT_S)[0], "the process is still there"


@pytest.mark.parametrize("kind", deep_after(1, [MoveKind.LOAD, MoveKind.STORE]))
def test_killed_agent_is_a_miss_and_is_replaced(tmp_path: Path, kind: MoveKind) -> None:
    with AgentRig(tmp_path, slots=2) as rig:
        rig.stored(1, 2, 3)
        rig.pool.clear(11, 12, 13)
        before, pid, gate = restarts(), pid_of(rig), rig.gate(kind)
        assert rig.transfer_agent.submit(load(2, 1, 11, 12, 13) if kind == MoveKind.LOAD else store(2, 4, 5, 6))
        assert rig.transfer_agent.submit(load(3, 1, 14) if kind == MoveKind.LOAD else store(3, 7))
        gate.let_through(2)  # the engine hears of the first page when the second finds no slot
        for _ in range(3):
            rig.drive(gate.await_page)
        rig.until(lambda: kind == MoveKind.STORE or rig.pool.pages[11] == body(1))
        os.kill(pid, signal.SIGKILL)
        arrived = int(kind == MoveKind.LOAD)
        assert [(r.id, r.ok, r.pages) for r in rig.results(2)] == [(2, False, arrived), (3, False, 0)]
        assert rig.pool.pages[12:15] == [EMPTY, EMPTY, body(14)]
        gate.open()
        rig.until_ok(load(4, 1, 12, 13))
        assert rig.do(store(5, 8, 9)).ok
        assert rig.transfer_agent.pid != pid and restarts() == before + 1


def test_hanging_agent_is_replaced(tmp_path: Path) -> None:
    with AgentRig(tmp_path, timeouts=replace(QUICK, silent_pings=15)) as rig:
        rig.stored(1)
        pid = pid_of(rig)
        os.kill(pid, signal.SIGSTOP)
        result = rig.do(load(2, 1, 11))
        assert (result.ok, result.pages) == (False, 0)
        rig.until_ok(load(3, 1, 11))
        assert rig.transfer_agent.pid != pid
        assert not Path(f"/proc/{pid}").exists()


def test_moves_are_refused_without_an_agent(tmp_path: Path) -> None:
    with AgentRig(tmp_path, timeouts=replace(QUICK, first_backoff_s=3600.0)) as rig:
        rig.stored(1)
        gate = rig.gate(MoveKind.LOAD)
        assert rig.transfer_agent.submit(load(2, 1, 11))
        gate.await_page()
        os.kill(pid_of(rig), signal.SIGKILL)
        assert not rig.results(1)[0].ok
        assert not rig.transfer_agent.submit(load(3, 1, 11))
        rig.transfer_agent.cancel_all()
        assert not rig.transfer_agent.submit(load(4, 1, 11)) and rig.transfer_agent.take_results() == []


@pytest.mark.parametrize(
    "command",
    [
        (sys.executable, "-c", "raise SystemExit(7)"),
        ("/nowhere/at/all",),
        (  # speaks, but not our language
            sys.executable,
            "-c",
            "import os, sys; fd = int(sys.argv[sys.argv.index('--socket') + 1]);"
            " os.write(fd, b'\\xff' * 64); os.read(0, 1) or os.read(fd, 1 << 20)",
        ),
    ],
)
def test_failed_start_of_an_agent_is_retried(tmp_path: Path, command: tuple[str, ...]) -> None:
    before = restarts()
    with AgentRig(tmp_path, command=command) as rig:
        clock = threading.Event()
        while restarts() < before + 3:
            if rig.transfer_agent.submit(load(1, 1, 11)):
                assert not rig.results(1)[0].ok
            rig.transfer_agent.take_results()
            clock.wait(0.01)


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        (AgentFrameKind.RELEASED, [3, 4]),  # the ring has four slots
        (AgentFrameKind.RELEASED, [1]),  # a slot of loads
        (AgentFrameKind.RELEASED, [-1]),
        (AgentFrameKind.ARRIVED, [0, 4]),
        (AgentFrameKind.ARRIVED, [0, 2]),  # a slot of stores
        (AgentFrameKind.ARRIVED, [0, -1]),
    ],
    ids=lambda value: value.name if isinstance(value, AgentFrameKind) else str(value),
)
def test_agent_that_names_a_wrong_slot_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: AgentFrameKind, numbers: list[int]
) -> None:
    with AgentRig(tmp_path, slots=4) as rig:
        given_up: list[str] = []
        monkeypatch.setattr(rig.transfer_agent, "_give_up", given_up.append)
        assert rig.transfer_agent.submit(load(1, 1, 11))
        rig.transfer_agent._receive_frame(Frame.of(kind, 0, 1, numbers))
        slots = "2 to 3" if kind is AgentFrameKind.RELEASED else "0 to 1"
        assert given_up == [f"it sends nonsense: slot {numbers[-1]} is none of {slots}"]


def test_agent_that_releases_a_slot_twice_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pages would be copied into the slot. So is an agent that releases a slot which was not filled for it."""
    with AgentRig(tmp_path, slots=4) as rig:
        agent, given_up = rig.transfer_agent, list[str]()
        gate = rig.gate(MoveKind.STORE)
        assert agent.submit(store(1, 4))
        rig.drive(gate.await_page)
        (filled,) = agent._filled
        monkeypatch.setattr(agent, "_give_up", given_up.append)
        for slots in ([2 + 3 - filled], [filled, filled]):
            agent._receive_frame(Frame.of(AgentFrameKind.RELEASED, 0, 1, slots))
        assert given_up == ["it sends nonsense: it releases a slot that it does not have"] * 2
        agent._receive_frame(Frame.of(AgentFrameKind.RELEASED, 0, 1, [filled]))
        agent._receive_frame(Frame.of(AgentFrameKind.RELEASED, 0, 1, [filled]))
        assert len(given_up) == 3 and sorted(agent._free) == [2, 3]
        gate.open()


def test_broken_pool_makes_misses(tmp_path: Path) -> None:
    with AgentRig(tmp_path) as rig:
        rig.stored(1)
        rig.pool.broken = True
        assert not rig.do(load(2, 1, 11)).ok
        rig.pool.broken = False
        rig.until_ok(load(4, 1, 11))


def test_agent_ignores_signals_to_the_process_group(tmp_path: Path) -> None:
    with AgentRig(tmp_path) as rig:
        pid = pid_of(rig)
        for number in (signal.SIGINT, signal.SIGTERM):  # at its first instruction, perhaps
            os.kill(pid, number)
        rig.stored(1)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        assert rig.do(load(2, 1, 11)).ok and rig.transfer_agent.pid == pid


def test_close_leaves_no_process_no_descriptor_and_no_thread(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    with AgentRig(tmp_path / "first") as rig:
        rig.stored(1)  # what stays open for good is open now
    before, threads = fds(), threading.active_count()
    (tmp_path / "second").mkdir()
    with AgentRig(tmp_path / "second", slots=2) as rig:
        pid = pid_of(rig)
        rig.stored(1, 2)
        os.kill(pid, signal.SIGKILL)
        rig.until_ok(load(2, 1, 11))
        pidfd = os.pidfd_open(pid_of(rig))
        rig.transfer_agent.submit(load(3, 1, 12, 13))  # close in mid-move
    try:
        await_end(pidfd)
    finally:
        os.close(pidfd)
    assert fds() == before and threading.active_count() == threads
    assert not Path(f"/proc/{pid}").exists()


ORPHAN = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from tests.fakes.kv_transfer.agent_rig import AgentRig
    rig = AgentRig(Path(sys.argv[1]))
    rig.stored(1)
    print(rig.transfer_agent.pid, flush=True)
    sys.stdin.read()
    """
)


@pytest.mark.parametrize("stopped", deep_after(1, [True, False]))
def test_agent_ends_with_its_worker_even_while_it_hangs(tmp_path: Path, stopped: bool) -> None:
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    worker = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    try:
        assert worker.stdout is not None
        pid = int(worker.stdout.readline())
        pidfd = os.pidfd_open(pid)
        if stopped:
            os.kill(pid, signal.SIGSTOP)
    finally:
        worker.kill()
        worker.communicate(timeout=WAIT_S)
    try:
        await_end(pidfd)
    finally:
        os.close(pidfd)


def test_agent_starts_fast_and_imports_little(tmp_path: Path) -> None:
    """The real one, without a kvstore at the other end."""
    with AgentRig(tmp_path, command=COMMAND) as rig:
        result = rig.do(load(1, 1, 11))
        pid = rig.transfer_agent.pid
        assert pid is not None
        spent_s = cpu_s(pid)
        maps = Path(f"/proc/{pid}/maps").read_text()
        status = Path(f"/proc/{pid}/status").read_text()
    assert not result.ok
    assert "grpc" in maps and not [name for name in ("torch", "numba", "llvmlite") if name in maps]
    resident_kb = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
    assert resident_kb < 100 * 1024
    assert spent_s < 2, f"{spent_s} s: of a processor, since a busy machine may take longer"
