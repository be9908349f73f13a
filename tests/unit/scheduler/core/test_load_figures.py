"""A Load can be written whatever there is to tell."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from quire_common.credit.hello import Epoch
from quire_common.version import installed_version
from quire_scheduler.core.scheduler import LoadFigures
from quire_scheduler.service.load_watch import load_to_pb, watch_load
from quire_scheduler.service.wake_event import WakeEvent


def test_waiting_tokens_saturate_at_the_fields_bound() -> None:
    """5,000 prompts of a million tokens: the stream of each router that watches would break, at every attempt."""
    figures = LoadFigures(5000, 2**40, 64, 9, 1, 8, 5_000_000_000, 1e39, 0.0, 0.0, 0, 1.0, 0.0, b"host", 2**63)
    core = SimpleNamespace(load=lambda: figures, hello=SimpleNamespace(epoch=Epoch(1, 1)))
    roles = SimpleNamespace(role="both")
    engine: Any = SimpleNamespace(
        phase="ready", progress=1.0, detail="", roles=roles, core=core, oldest_wait_s=10_000_000.0
    )
    load = load_to_pb(engine, "scheduler-1")
    assert (load.running, load.waiting, load.waiting_prefill_tokens) == (5000, 2**32 - 1, 2**32 - 1)
    assert (load.kvstore_boot_id, load.host) == (2**63, b"host")
    assert load.oldest_wait_ms == 2**32 - 1


def test_load_tells_the_longest_wait_the_version_and_when_the_first_certificate_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire_scheduler.service.load_watch.first_expiry", lambda: 1_900_000_000.5)
    roles = SimpleNamespace(role="both")
    engine: Any = SimpleNamespace(phase="ready", progress=1.0, detail="", roles=roles, core=None, oldest_wait_s=1.2345)
    load = load_to_pb(engine, "scheduler-1")
    assert (load.oldest_wait_ms, load.certificate_expiry_unix_s) == (1234, 1_900_000_000)
    assert load.version == installed_version("quire-scheduler") != ""


async def test_phase_change_while_a_watcher_reads_slowly_is_told_at_once() -> None:
    engine: Any = SimpleNamespace(
        phase="loading",
        progress=0.0,
        detail="",
        roles=SimpleNamespace(role="both"),
        core=None,
        oldest_wait_s=0.0,
        phase_changed=WakeEvent(),
    )
    loads = watch_load(engine, "scheduler-1", 60_000)
    assert (await anext(loads)).phase == "loading"
    engine.phase = "ready"
    engine.phase_changed.set()
    async with asyncio.timeout(10.0):
        assert (await anext(loads)).phase == "ready"
