"""Services of the last release and of this tree serve together: an upgrade under load, one process after the other, and
the way back. No request fails, and no answer changes.

The upgrade goes from the engines to the router, the rollback from the kvstore to the workers, so that each kind of
service is the newer and the older neighbour of each other kind. The router restarts between loads: it holds the
clients' connections (with a second router nobody would notice, see test_rolling_routers.py).
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from quire.local.pids import PROC
from quire.local.rolling import Rolling, Turn
from tests.chaos.judge import STREAMS
from tests.chaos.load import Load
from tests.chaos.references import References
from tests.chaos.rig import LIMIT_S, Rig
from tests.chaos.scripts import make_scripts
from tests.upgrade import launch
from tests.upgrade.last_release import ROOT, last_release

pytestmark = pytest.mark.slow
MEMBERS = ("kvstore", "worker-1", "worker-2", "scheduler-1", "scheduler-2", "tokenizer-1", "tokenizer-2", "router")
UPGRADE = ("worker-1", "scheduler-1", "worker-2", "scheduler-2", "tokenizer-1", "tokenizer-2", "kvstore")
# A machine that has other work too stops a process for seconds: that is not what is tested.
PATIENT = {
    "router": {"tokenizer-timeout-s": "60", "replica-timeout-s": "60"},
    "scheduler": {"worker-heartbeat-s": "60", "worker-timeout-s": "120"},
}
ROLLBACK = ("kvstore", "tokenizer-1", "tokenizer-2", "scheduler-1", "worker-1", "scheduler-2", "worker-2")


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_STATE_DIR", str(tmp_path / "state"))


class Fleet:
    """A stack each of whose processes is of one of two trees."""

    def __init__(self, folder: Path, tree: Path) -> None:
        self._folder = folder
        self.trees = dict.fromkeys(MEMBERS, tree)
        for member in MEMBERS:
            self._assign(member, tree)
        command = (sys.executable, str(Path(launch.__file__)), str(folder))
        self.rig = Rig("paced 50", flags=PATIENT, commands={member: (*command, member) for member in MEMBERS})
        self._rolling = Rolling(self.rig.stack.directory, LIMIT_S, lambda line: print(line, flush=True))

    def restart(self, member: str, tree: Path) -> None:
        """Put a process of the tree in the member's place, and wait until it serves."""
        self._assign(member, tree)
        self._rolling.run([Turn((member,))])
        self.check()

    def check(self) -> None:
        """Each process runs code of its tree, and nothing else."""
        for member, tree in self.trees.items():
            environment = (PROC / str(self.rig.service(member).pid) / "environ").read_bytes().split(b"\0")
            assert f"PYTHONPATH={launch.python_path(tree)}".encode() in environment, f"{member} is not of {tree}"

    def _assign(self, member: str, tree: Path) -> None:
        self.trees[member] = tree
        (self._folder / member).write_text(str(tree))


async def restart_under_load(
    fleet: Fleet, members: Sequence[str], tree: Path, references: References, seed: int
) -> Load:
    """Restart the members one by one while streams ask. Returns the load, which has ended."""
    load = Load(fleet.rig, STREAMS, seed, references)
    load.start()
    for member in members:
        before = load.answers
        await asyncio.to_thread(fleet.restart, member, tree)
        while load.answers < before + STREAMS and not load.failures:
            await asyncio.sleep(0.1)
    await load.finish()
    await fleet.rig.wait_whole()
    fleet.rig.wait_pages_back()
    return load


async def test_an_upgrade_and_its_rollback_fail_no_request(tmp_path: Path) -> None:
    old, new = last_release(), ROOT
    seed = int(os.environ.get("CHAOS_SEED") or random.randrange(1 << 24))
    print(f"\nCHAOS_SEED={seed}; {old.name} beside this tree")
    fleet = Fleet(tmp_path, old)
    async with fleet.rig as rig:
        await rig.wait_whole()
        fleet.check()
        learning = Load(rig, STREAMS, seed)
        await learning.learn(make_scripts(12, seed, 20, 80))
        loads = [await restart_under_load(fleet, UPGRADE, new, learning.references, seed)]
        await asyncio.to_thread(fleet.restart, "router", new)
        await rig.wait_whole()
        assert set(fleet.trees.values()) == {new}
        loads.append(await restart_under_load(fleet, ROLLBACK, old, learning.references, seed + 1))
        await asyncio.to_thread(fleet.restart, "router", old)
        await rig.wait_whole()
        loads.append(await restart_under_load(fleet, (), old, learning.references, seed + 2))
        for name, load in zip(("upgrade", "rollback", "after it"), loads, strict=True):
            print(f"{name}: {load.answers} answers, {load.left} left, {len(load.failures)} bad")
        failures = [failure for load in loads for failure in load.failures]
        assert not failures, "\n".join(failures[:20])
        assert all(load.answers >= STREAMS * 7 for load in loads[:2])
        assert rig.stack.deaths == []
