"""vLLM's event wire: its option, its bytes, its sockets, and what is said when changes come too fast."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import pytest
import zmq

from quire_common.columns import pack_i32
from quire_common.credit import WorkerHello
from quire_common.errors import ConfigError
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.kv.page_names import PageEvent, PageNames, Removed, Stored
from quire_scheduler.service.kv_events.event_pump import EventPump, make_event_pump
from quire_scheduler.service.kv_events.event_wire import EventWire
from quire_scheduler.service.kv_events.events_config import KvEventsConfig, parse_kv_events_config
from quire_scheduler.service.kv_events.zmq_publisher import ZmqPublisher
from quire_scheduler.service.wake_event import WakeEvent
from tests.fakes.scheduler.kv_subscriber import AllBlocksCleared, BlockRemoved, BlockStored, Subscriber, decode
from tests.fakes.worker.fake_worker import make_hello

A, B, C = (bytes([n]) * 24 + bytes(7) + bytes([n]) for n in (1, 2, 3))


def test_the_option_has_vllms_names_and_defaults() -> None:
    assert not parse_kv_events_config("").enabled and not parse_kv_events_config("{}").enabled
    config = parse_kv_events_config('{"enable_kv_cache_events": true, "publisher": null}')
    assert config.enabled and config == KvEventsConfig(enable_kv_cache_events=True)
    assert (config.buffer_steps, config.hwm, config.max_queue_size, config.topic) == (10_000, 100_000, 100_000, "")
    assert not parse_kv_events_config('{"enable_kv_cache_events": true, "publisher": "null"}').enabled


@pytest.mark.parametrize(
    ("endpoint", "binds"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("ipc:///tmp/events", True),
        ("tcp://127.0.0.1:*", True),
        ("tcp://indexer:5557", False),
        ("tcp://127.0.0.1:9000", False),
    ],
)
def test_wildcard_endpoints_are_bound_as_in_vllm(endpoint: str, binds: bool) -> None:
    assert parse_kv_events_config(json.dumps({"endpoint": endpoint})).binds == binds
    assert parse_kv_events_config(json.dumps({"endpoint": endpoint, "bind": not binds})).binds != binds


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        pytest.param('{"topic":' * 100_000, "nested too deeply", id="deep"),
        ('{"enable": true}', "supported: enable_kv_cache_events, publisher"),
        ('{"publisher": "kafka"}', "supported: null, zmq"),
        ('{"enable_kv_cache_events": 1}', "not bool"),
        ('{"hwm": true}', "not int"),
        ('{"buffer_steps": 0}', "at least 1"),
        ('{"topic": null}', "not str"),
        ('{"endpoint": "here"}', "transport"),
        ('{"replay_endpoint": "here"}', "transport"),
        ('{"endpoint": "ws://*:5557"}', "transport"),
        ('{"endpoint": "epgm://eth0;239.192.1.1:5555"}', "transport"),
    ],
)
def test_a_bad_option_is_named(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse_kv_events_config(text)
    assert caught.value.code == "BAD_VALUE" and caught.value.param == "kv_events_config"


def test_event_batches_are_encoded_as_vllms_tagged_arrays() -> None:
    wire = EventWire(2, 1)
    events = [
        PageEvent(1, (Stored(0, b"", (A, B), pack_i32([5, 6, 7, -1])),), ()),
        PageEvent(2, (Stored(0, A, (C,), pack_i32([8, 9])),), (Removed(0, (B,)),)),
    ]
    ts, batch, rank = msgspec.msgpack.decode(wire.changes(events))
    low = [int.from_bytes(digest[-8:], "big") for digest in (A, B, C)]
    assert ts > 1e9 and rank == 0
    assert batch == [
        ["BlockStored", low[:2], None, [5, 6, 7, -1], 2, None, "GPU", None, None, None],
        ["BlockRemoved", [low[1]], "GPU", None],
        ["BlockStored", [low[2]], low[0], [8, 9], 2, None, "GPU", None, None, None],
    ]
    assert msgspec.msgpack.decode(wire.cleared())[1] == [["AllBlocksCleared"]]
    (stored,) = decode(EventWire(2, 2).snapshot([Stored(1, b"", (A,), pack_i32([1, 2]))])).events
    assert isinstance(stored, BlockStored) and stored.group_idx == 1 and stored.medium == "GPU"


def publisher(**fields: Any) -> ZmqPublisher:
    loose = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*", "topic": "kv"}
    return ZmqPublisher(KvEventsConfig(enable_kv_cache_events=True, **(loose | fields)))


def test_subscriber_can_replay_missed_batches() -> None:
    source, wire = publisher(buffer_steps=4), EventWire(2, 1)
    subscriber = Subscriber(source.endpoint, source.replay_endpoint, "kv")
    try:
        subscriber.joined(source.publish, wire.cleared())
        first = subscriber.last
        for page in range(6):
            assert source.publish(wire.changes([PageEvent(1, (), (Removed(0, (bytes([page]) * 32,)),))]))
            number, batch = subscriber.next()
            assert number == first + page + 1 and isinstance(batch.events[0], BlockRemoved)
        missed = subscriber.replay(first + 4)
        assert [number for number, _ in missed] == [first + 4, first + 5, first + 6]
        assert [number for number, _ in subscriber.replay(0)] == [first + 3 + n for n in range(4)], "no more are kept"
        assert subscriber.replay(1 << 40) == []
    finally:
        subscriber.close()
        source.close()


def test_subscribers_get_their_topic_alone_and_bad_replay_requests_are_ignored() -> None:
    source, wire = publisher(), EventWire(2, 1)
    subscriber = Subscriber(source.endpoint, source.replay_endpoint, "kv")
    stranger = Subscriber(source.endpoint, source.replay_endpoint, "other")
    rude = subscriber.context.socket(zmq.DEALER)
    try:
        rude.connect(source.replay_endpoint)
        for question in ([b"short"], [b"", b"short"], [b"", b"x" * 9], [b""] * 5):
            rude.send_multipart(question)
        subscriber.joined(source.publish, wire.cleared())
        assert subscriber.replay(subscriber.last)
        with pytest.raises(TimeoutError):
            stranger.next(timeout_ms=200)
    finally:
        rude.close(0)
        stranger.close()
        subscriber.close()
        source.close()


def test_taken_endpoint_is_a_typed_error() -> None:
    source = publisher()
    try:
        for field_name in ("endpoint", "replay_endpoint"):
            with pytest.raises(ConfigError) as caught:
                publisher(**{field_name: source.endpoint, "bind": True})
            assert caught.value.code == "PORT_IN_USE"
        with pytest.raises(ConfigError) as caught:
            publisher(endpoint="tcp://no such host:*")
        assert caught.value.code == "BAD_VALUE"
    finally:
        source.close()


@dataclass
class Core:
    hello: WorkerHello
    names: PageNames


@dataclass
class Engine:
    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    core: Core | None = None
    pages_changed: WakeEvent = field(default_factory=WakeEvent)

    def attach(self, tail: int) -> PageNames:
        self.core = Core(make_hello(page_size=2), PageNames(1, tail))
        self.core.names.listeners.append(self.pages_changed.set)
        self.pages_changed.set()
        return self.core.names


class Pipe:
    """A publisher that is full now and then."""

    def __init__(self) -> None:
        self.open = True
        self.events: list[Any] = []

    def publish(self, payload: bytes) -> bool:
        if self.open:
            self.events += decode(payload).events
        return self.open

    def close(self) -> None:
        self.open = False


async def test_the_pump_follows_epochs_and_catches_up_from_a_snapshot() -> None:
    engine, pipe = Engine(), Pipe()
    pump = asyncio.ensure_future(EventPump(cast("Any", engine), pipe, EventWire).run())

    async def heard(count: int) -> list[Any]:
        async with asyncio.timeout(60):
            while len(pipe.events) < count:
                await asyncio.sleep(0.005)
        return pipe.events

    names = engine.attach(tail=4)
    names.name(0, [1], b"", [A], pack_i32([1, 2]))
    (stored,) = await heard(1)
    assert isinstance(stored, BlockStored) and stored.token_ids == [1, 2] and stored.block_size == 2
    pipe.open = False
    for page in range(2, 12):
        names.name(0, [page], b"", [bytes([page]) * 32], pack_i32([page, page]))
        await asyncio.sleep(0)
    pipe.open = True
    events = await heard(14)
    assert isinstance(events[2], AllBlocksCleared), "the change that was waiting, and then all anew"
    assert sorted(digest for event in events[3:] for digest in event.block_hashes) == sorted(
        int.from_bytes(digest[-8:], "big") for digest in (A, *(bytes([page]) * 32 for page in range(2, 12)))
    )
    pipe.events.clear()
    engine.core = None
    engine.pages_changed.set()
    assert isinstance((await heard(1))[0], AllBlocksCleared)
    engine.attach(tail=4).name(0, [1], b"", [C], pack_i32([3, 3]))
    assert isinstance((await heard(2))[1], BlockStored)
    pump.cancel()


async def test_resync_yields_to_the_event_loop() -> None:
    engine, pipe = Engine(), Pipe()
    names = engine.attach(tail=4)
    for page in range(4 * 1024):
        names.name(0, [page], b"", [page.to_bytes(32, "big")], pack_i32([page, page]))
    pump, turns = asyncio.ensure_future(EventPump(cast("Any", engine), pipe, EventWire).run()), 0
    async with asyncio.timeout(60):
        while len(pipe.events) < 2:
            await asyncio.sleep(0)
        while sum(isinstance(event, BlockStored) for event in pipe.events) < 4 * 1024:
            await asyncio.sleep(0)
            turns += 1
    pump.cancel()
    assert turns >= 3


async def test_without_the_option_there_is_no_pump() -> None:
    assert make_event_pump(SchedulerConfig(), cast("Any", Engine())) is None


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        ({"endpoint": "tcp://*:0"}, "INSECURE_LISTEN", r"port on \*"),
        ({"endpoint": "tcp://[::]:0"}, "INSECURE_LISTEN", "port on ::"),
        ({"endpoint": "tcp://10.0.0.7:0", "bind": True}, "INSECURE_LISTEN", "port on 10.0.0.7"),
        ({"replay_endpoint": "tcp://eth0:0"}, "INSECURE_LISTEN", "port on eth0"),
        ({"endpoint": "tcp://indexer:5557"}, "INSECURE_CONNECT", "sends to indexer"),
        ({"endpoint": "tcp://10.0.0.7:5557"}, "INSECURE_CONNECT", "sends to 10.0.0.7"),
        ({"endpoint": "tcp://127.0.0.1:0;10.0.0.7:5557"}, "INSECURE_CONNECT", "sends to 10.0.0.7"),
        ({"endpoint": "tcp://indexer"}, "INSECURE_CONNECT", "sends to"),
    ],
)
async def test_events_leave_the_host_only_where_that_is_asked_for(given: dict[str, Any], code: str, says: str) -> None:
    option = json.dumps({"enable_kv_cache_events": True} | given)
    with pytest.raises(ConfigError, match=says) as caught:
        make_event_pump(SchedulerConfig(kv_events_config=option), cast("Any", Engine()))
    assert (caught.value.code, caught.value.param) == (code, "kv_events_config") and "--insecure" in caught.value.fix
    # Mutual TLS of the scheduler's own port secures none of ZeroMQ's.
    with pytest.raises(ConfigError):
        make_event_pump(SchedulerConfig(kv_events_config=option, tls_cert="c", tls_key="k"), cast("Any", Engine()))


@pytest.mark.parametrize(
    ("given", "insecure"),
    [
        ({"endpoint": "tcp://127.0.0.1:*"}, False),
        ({"endpoint": "tcp://127.0.0.1:9"}, False),
        ({"endpoint": "tcp://localhost:9"}, False),
        ({"endpoint": "tcp://192.0.2.1:9"}, True),
    ],
)
async def test_events_of_this_host_and_of_a_trusted_network_are_published(
    given: dict[str, Any], insecure: bool
) -> None:
    option = json.dumps({"enable_kv_cache_events": True} | given)
    pump = make_event_pump(SchedulerConfig(kv_events_config=option, insecure=insecure), cast("Any", Engine()))
    assert pump is not None
    pump.close()
