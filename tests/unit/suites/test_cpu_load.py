"""What the suite of abuse takes for the CPU load of some processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.abuse.cpu_load import CpuLoad


def test_threads_that_run_and_threads_that_wait_for_a_core_count(tmp_path: Path) -> None:
    load = CpuLoad(tmp_path)
    for now in (0, 1):
        _tell(tmp_path, 7, 70, ran_ns=now * 10**9, waited_ns=0)
        _tell(tmp_path, 8, 80, ran_ns=0, waited_ns=now * 5 * 10**8)
        load.sample([7, 8, 9], float(now))
    assert load.threads == pytest.approx(1.5)


def test_of_many_windows_the_fullest_counts(tmp_path: Path) -> None:
    load = CpuLoad(tmp_path)
    for now, total_s in enumerate([0.0, 0.5, 2.5, 2.75]):
        _tell(tmp_path, 7, 70, ran_ns=round(total_s * 1e9), waited_ns=0)
        load.sample([7], float(now))
        load.sample([7], now + 0.5)  # too early: looks at nothing
    assert load.threads == pytest.approx(2.0)


def test_a_kernel_that_does_not_tell(tmp_path: Path) -> None:
    load = CpuLoad(tmp_path)
    load.sample([7], 0.0)
    load.sample([7], 2.0)
    assert load.threads == 0.0


def _tell(proc: Path, pid: int, thread: int, *, ran_ns: int, waited_ns: int) -> None:
    folder = proc / str(pid) / "task" / str(thread)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "schedstat").write_text(f"{ran_ns} {waited_ns} 1\n", encoding="ascii")
