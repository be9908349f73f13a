"""The table of faults: two hundred and more on one stack of real processes, under sixteen streams.

CHAOS_SEED: which; CHAOS_ROWS: only rows that this regular expression finds, each CHAOS_TIMES times (1);
CHAOS_FAULTS: how many, of all by default. Each round of such a run is written to docs/fault-tolerance.json at once.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.chaos.table.fault_table import ROWS, Row
from tests.chaos.table.record import write_record
from tests.chaos.table.runner import Round, Runner, StackLost, assert_survived, detection_p99, pause_p99, select_rows
from tests.chaos.table.table_rig import TableRig
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]
pytestmark = pytest.mark.slow


async def test_streams_survive_the_table_of_faults(
    chaos_seed: int, seed: int, tmp_path: Path, redis_server: RedisServer
) -> None:
    rows, recorded = chosen_rows(seed)
    began = time.monotonic()

    def note(rounds: Sequence[Round]) -> None:
        if recorded:
            write_record(rounds, chaos_seed, time.monotonic() - began, len(os.sched_getaffinity(0)))

    runner = Runner(rows, seed, note)
    while not runner.ended:
        folder = tmp_path / f"after-{len(runner.rounds)}"
        folder.mkdir()
        try:
            async with TableRig(folder, redis_server) as rig:
                await runner.run(rig)
        except StackLost as error:
            print(f"the stack is lost, and another one goes on: {error}", flush=True)
    rounds = runner.rounds
    print(f"{len(rounds)} faults in {time.monotonic() - began:.0f} s, {sum(one.bad for one in rounds)} of them bad")
    print(f"p99: noticed in {detection_p99(rounds):.2f} s, pause {pause_p99(rounds):.2f} s")
    assert_survived(rounds)


def chosen_rows(seed: int) -> tuple[list[Row], bool]:
    """The rows to run, and whether they are recorded: rows that somebody has picked are not."""
    wanted, count = os.environ.get("CHAOS_ROWS", ""), int(os.environ.get("CHAOS_FAULTS", "0"))
    if not wanted:
        return select_rows(ROWS, seed, count), True
    rows = [row for row in ROWS if re.search(wanted, row.name)]
    assert rows, f"no row is named {wanted!r}"
    return rows * int(os.environ.get("CHAOS_TIMES", "1")), False
