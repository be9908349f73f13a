"""A rig whose answers depend on its caches: few pages on each device, a shared kvstore, and a look into it. And what
the same scripts are answered by a stack without any cache, which is what every answer must be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import cache

import grpc

from quire.v1 import kvstore_pb2, kvstore_pb2_grpc
from tests.chaos.load import Load
from tests.chaos.references import References
from tests.chaos.rig import LIMIT_S, Rig
from tests.chaos.scripts import Script, make_conversations

Flags = dict[str, dict[str, str | bool]]
Wanted = Callable[[kvstore_pb2.StatsResponse], bool]
STREAMS = 8
# Of the kvstore's look-outs: leases and puts live for milliseconds.
_LOOK_S = 0.002
_MOMENT_LIMIT_S = 60.0
# Of a device for some of the conversations, so that others leave it: of a paced worker, and bytes of a CPU's.
_PACED_PAGES, _CPU_BYTES = 100, 100 * 131_072
COLD: Flags = {"scheduler": {"enable-prefix-caching": False, "kvstore-min-tokens": "1000000"}}


def caching(engine: str, kvstore: Mapping[str, str]) -> Flags:
    """Flags of a stack that is short of pages."""
    small = ("kv-cache-memory-bytes", str(_CPU_BYTES)) if engine == "cpu" else ("paced-pages", str(_PACED_PAGES))
    return {"worker": dict([small]), "kvstore": dict(kvstore), "scheduler": {"kvstore-timeout-ms": "2000"}}


@cache
def scripts(engine: str) -> tuple[Script, ...]:
    """Always the same, so that they are learned once."""
    lengths = (8, 24) if engine == "cpu" else (10, 60)
    return tuple(make_conversations(9, 3, 7, *lengths))


_learned: dict[str, References] = {}


async def cold(engine: str) -> References:
    """What a stack without caches answers."""
    if engine not in _learned:
        async with Rig(engine, replicas=1, tokenizers=1, flags=COLD) as rig:
            load = Load(rig, 1, 0)
            await load.learn(scripts(engine))
        _learned[engine] = load.references
    return _learned[engine]


def kv_stats(rig: Rig) -> kvstore_pb2.StatsResponse | None:
    """None while it is away."""
    with grpc.insecure_channel(f"127.0.0.1:{rig.service('kvstore').port}") as channel:
        return _stats(kvstore_pb2_grpc.KvStoreStub(channel))


async def until(
    rig: Rig, wanted: Callable[[kvstore_pb2.StatsResponse], bool], limit_s: float = _MOMENT_LIMIT_S
) -> bool:
    """Look closely until the kvstore is as wanted; whether it ever was."""
    return await asyncio.to_thread(_until, rig, wanted, limit_s)


def _until(rig: Rig, wanted: Wanted, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    with grpc.insecure_channel(f"127.0.0.1:{rig.service('kvstore').port}") as channel:
        stub = kvstore_pb2_grpc.KvStoreStub(channel)
        while time.monotonic() < deadline:
            stats = _stats(stub)
            if stats is not None and wanted(stats):
                return True
            time.sleep(_LOOK_S)
    return False


def _stats(stub: kvstore_pb2_grpc.KvStoreStub) -> kvstore_pb2.StatsResponse | None:
    try:
        answer: kvstore_pb2.StatsResponse = stub.Stats(kvstore_pb2.StatsRequest(), timeout=5, wait_for_ready=True)
    except grpc.RpcError:
        return None
    return answer


async def assert_at_rest(rig: Rig) -> None:
    """No page is in use, no lease is out and no put is open."""
    await rig.wait_whole()
    rig.wait_pages_back()
    assert await until(rig, lambda s: not s.leases and not s.pending_puts, LIMIT_S), f"leases stay: {kv_stats(rig)}"


def tier(stats: kvstore_pb2.StatsResponse, medium: str) -> kvstore_pb2.TierStats:
    """Its figures."""
    return next(each for each in stats.tiers if each.medium == medium)
