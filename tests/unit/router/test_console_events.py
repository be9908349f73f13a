"""The console's stream is bounded: in time, in size, in readers; and it costs nothing while nobody reads it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import pytest

from quire_common.errors import Overloaded, PermissionDenied
from quire_router.api_keys import ApiKeys
from quire_router.front.http.console import events, snapshot
from quire_router.front.http.console.events import ConsoleEvents
from quire_router.front.http.console.snapshot import Snapshots, SnapshotSources
from quire_router.front.http.exchange import SCOPE_KEY
from quire_router.requests.live_generations import LiveRequest
from quire_router.requests.waterfall import Hop
from quire_router.sequences.sequence_placement import Run

INTERVAL_S = 0.02


class Reader:
    """A client of the stream. While `reads` is clear it takes nothing."""

    def __init__(self, stream: ConsoleEvents, method: str = "GET", **headers: str) -> None:
        self.frames: list[bytes] = []
        self.ended = False
        self.reads = asyncio.Event()
        self.reads.set()
        self._gone = asyncio.Event()
        scope = {
            "type": "http",
            "method": method,
            "client": ("127.0.0.1", 1),
            "headers": [(b"host", b"127.0.0.1"), *((name.encode(), value.encode()) for name, value in headers.items())],
            SCOPE_KEY: SimpleNamespace(authorization=""),
        }
        self.task = asyncio.ensure_future(stream(scope, self._receive, self._send))

    def leave(self) -> None:
        self._gone.set()

    async def _receive(self) -> Any:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            await self.reads.wait()
            self.ended = not message.get("more_body", False)
            if message["body"]:
                self.frames.append(message["body"])


class Rig:
    def __init__(self, stall_s: float = 5.0, keys: ApiKeys | None = None) -> None:
        self.made = 0
        self.fails = False
        self.watched: list[bool] = []
        self.asked = self.rested = 0
        snapshots: Any = SimpleNamespace(frame=self._frame)
        stores: Any = SimpleNamespace(refresh=self._ask, close_channels=self._rest)
        keys = ApiKeys() if keys is None else keys
        self.stream = ConsoleEvents(snapshots, stores, keys, self.watched.append, INTERVAL_S, stall_s)

    def _frame(self) -> bytes:
        if self.fails:
            raise ValueError("no snapshot")
        self.made += 1
        return b"%d" % self.made

    async def _ask(self) -> None:
        self.asked += 1

    async def _rest(self) -> None:
        self.rested += 1


async def until(holds: Any) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.005)


async def test_one_snapshot_is_made_for_all_readers_and_none_for_nobody() -> None:
    rig = Rig()
    await asyncio.sleep(3 * INTERVAL_S)
    assert rig.made == 0 and rig.watched == []
    readers = [Reader(rig.stream) for _ in range(3)]
    await until(lambda: all(len(reader.frames) >= 4 for reader in readers))
    assert readers[0].frames[0] == b"data: 1\n\n"
    assert rig.made <= max(len(reader.frames) for reader in readers) + 1
    for reader in readers:
        reader.leave()
    await until(lambda: rig.watched == [True, False])
    made = rig.made
    await asyncio.sleep(3 * INTERVAL_S)
    assert (rig.made, rig.rested) == (made, 1) and all(reader.task.done() for reader in readers)
    again = Reader(rig.stream)
    await until(lambda: again.frames)
    await rig.stream.close()
    await until(lambda: again.ended)


async def test_snapshots_come_no_faster_than_the_interval() -> None:
    rig, loop = Rig(), asyncio.get_running_loop()
    began = loop.time()
    readers = [Reader(rig.stream) for _ in range(2)]
    await until(lambda: len(readers[0].frames) >= 6)
    assert rig.made <= (loop.time() - began) / INTERVAL_S + 2
    await rig.stream.close()


async def test_slow_reader_gets_the_newest_snapshot_only() -> None:
    rig = Rig()
    slow, fast = Reader(rig.stream), Reader(rig.stream)
    await until(lambda: slow.frames)
    slow.reads.clear()
    seen = rig.made
    await until(lambda: rig.made > seen + 5)
    slow.reads.set()
    await until(lambda: slow.frames[-1] == b"data: %d\n\n" % rig.made)
    assert len(slow.frames) < len(fast.frames), "those in between were left out"
    await rig.stream.close()


async def test_reader_that_takes_nothing_is_dropped_and_delays_nobody() -> None:
    rig = Rig(stall_s=0.1)
    stuck, fast = Reader(rig.stream), Reader(rig.stream)
    stuck.reads.clear()
    await until(stuck.task.done)
    assert not stuck.frames and len(fast.frames) >= 3
    seen = len(fast.frames)
    await until(lambda: len(fast.frames) > seen)
    await rig.stream.close()


async def test_readers_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MOST_WATCHERS", 2)
    rig = Rig()
    readers = [Reader(rig.stream) for _ in range(2)]
    await until(lambda: all(reader.frames for reader in readers))
    with pytest.raises(Overloaded, match="CONSOLE_FULL"):
        await Reader(rig.stream).task
    readers[0].leave()
    await until(readers[0].task.done)
    another = Reader(rig.stream)
    await until(lambda: another.frames)
    await rig.stream.close()


async def test_page_of_another_origin_is_refused_without_keys() -> None:
    rig = Rig()
    for name, value in (("origin", "https://elsewhere.example"), ("x-forwarded-for", "10.0.0.1")):
        with pytest.raises(PermissionDenied, match="ADMIN_NEEDS_KEY"):
            await Reader(rig.stream, **{name: value}).task
    assert rig.made == 0


async def test_stream_ends_when_the_key_is_no_longer_accepted() -> None:
    keys = ApiKeys(["a key"])
    rig = Rig(keys=keys)  # the edge would have refused this reader; the clock does too
    reader = Reader(rig.stream)
    await until(lambda: reader.ended)
    assert not reader.frames


async def test_head_request_gets_no_stream() -> None:
    rig = Rig()
    reader = Reader(rig.stream, "HEAD")
    await until(reader.task.done)
    assert reader.ended and not reader.frames


async def test_snapshot_that_cannot_be_made_ends_no_router() -> None:
    rig = Rig()
    rig.fails = True
    reader = Reader(rig.stream)
    await until(lambda: reader.ended)


def fat_request(number: int) -> LiveRequest:
    name = "x" * 128
    return LiveRequest(
        number=number, request_id=name, tenant=name, model=name, state="decoding", age_ms=1.0, first_token_ms=1.0,
        sequences=128, attempts=16, prompt_tokens=10**6, cached_tokens=10**6, output_tokens=10**6, max_tokens=10**6,
        runs=(Run(name, 10**6),) * 16, hops=(Hop("scheduler", "queue", name, 1.23456789, 1.23456789, 10**6),) * 24,
    )  # fmt: skip


class FatLive:
    """Many requests, each as long as it can be."""

    def __init__(self, requests: int) -> None:
        self.sums: dict[str, Any] = {}
        self.recent = deque(map(fat_request, range(24)))
        self._requests = requests

    def __len__(self) -> int:
        return self._requests

    def oldest(self, most: int) -> list[LiveRequest]:
        return list(map(fat_request, range(min(most, self._requests))))

    def by_tenant(self) -> Counter[str]:
        return Counter({f"tenant {i}": i for i in range(1000)})


def sources(requests: int) -> SnapshotSources:
    live: Any = FatLive(requests)
    part: Any = SimpleNamespace
    return SnapshotSources(
        instance="router",
        process=0,
        in_flight_limit=10,
        fleet=part(replicas={}),
        pool=part(peers={}),
        admission=part(open=True, inside=0),
        live=live,
        held_pages=list,
        stores=list,
        open_transfers=lambda: 0,
        tenant_name=str,
        model_name=str,
        with_actions=lambda: True,
    )


def test_snapshot_has_a_bounded_number_of_requests_and_tenants() -> None:
    told = Snapshots(sources(5_000)).snapshot()
    assert (len(told["requests"]["rows"]), told["requests"]["running"]) == (snapshot.MOST_REQUESTS, 5_000)
    assert len(told["requests"]["tenants"]) == snapshot.MOST_TENANTS


@pytest.mark.parametrize("most", [1_000_000, 100_000, 20_000])
def test_frame_is_never_longer_than_its_bound(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MOST_BYTES", most)
    frame = Snapshots(sources(5_000)).frame()
    assert len(frame) <= most and json.loads(frame)["requests"]["running"] == 5_000
