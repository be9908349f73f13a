"""Conversations that return after their pages have left a tiny device: they are found in memory, then on disk, then in
Redis, over the real services, with the tokens of the undisturbed run."""

from __future__ import annotations

import contextlib
import re
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import grpc
import numpy as np
import pytest

from bench.harness.processes import Service
from quire.v1 import kvstore_pb2, kvstore_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from quire_common.columns import i32
from quire_common.sequence import RequestContext, Sampling, Sequence, Stop, context_to_pb, sequence_to_pb
from quire_worker.paced.answer import paced_tokens
from tests.held_ports import held_ports
from tests.redis_server import RedisServer, redis_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["redis_server"]
PAGE = 16
PROMPT, ANSWER, MORE = 10 * PAGE, PAGE + 1, 5
USERS = 16
# Of a conversation when its answer is whole: the last token's KV is never needed.
PAGES = (PROMPT + ANSWER - 1) // PAGE
DEVICE_PAGES = 3 * PAGES
LIMIT_S = 60.0


class Told(NamedTuple):
    """What a request got."""

    tokens: list[int]
    cached: int


class Stack:
    """A kvstore, a paced worker and a scheduler, as processes."""

    def __init__(self, folder: Path, redis: str, *flags: str) -> None:
        self._ended = contextlib.ExitStack()
        (port,) = held_ports(1)
        self._metrics = f"http://127.0.0.1:{port}/metrics"
        with contextlib.ExitStack() as started:
            self.kvstore = started.enter_context(
                # Memory for about a dozen pages of the paced worker, and room for some more on the disk.
                Service("kvstore", "--ram-bytes=65536", "--disk-bytes=524288", f"--disk-path={folder}",
                        f"--redis-url={redis}", "--prefetch-ms=20000", "--redis-timeout-ms=20000")
            )  # fmt: skip
            store = self.kvstore.ready()
            worker = started.enter_context(
                Service("worker", "--paced=0.5", f"--block-size={PAGE}", f"--paced-pages={DEVICE_PAGES}",
                        "--max-model-len=512", "--max-num-seqs=4", f"--kvstore={store}")
            )  # fmt: skip
            scheduler = started.enter_context(
                Service("scheduler", f"--worker={worker.ready()}", f"--kvstore={store}", "--load-interval-ms=20",
                        "--kvstore-timeout-ms=20000", f"--metrics-listen=127.0.0.1:{port}", *flags)
            )  # fmt: skip
            channels = [started.enter_context(grpc.insecure_channel(s)) for s in (scheduler.ready(), store)]
            self._scheduler = scheduler_pb2_grpc.SchedulerStub(channels[0])
            self._store = kvstore_pb2_grpc.KvStoreStub(channels[1])
            self._ended = started.pop_all()

    def close(self) -> None:
        """End everything."""
        self._ended.close()

    def ask(self, prompt: list[int], tokens: int) -> Told:
        """One request, alone; returns when its pages are at rest."""
        sequence = Sequence(np.array(prompt, np.int32), Stop(tokens, ignore_eos=True), Sampling())
        request = scheduler_pb2.GenerateTokensRequest(
            context=context_to_pb(RequestContext("r")), sequence=sequence_to_pb(sequence)
        )
        got: list[int] = []
        for message in self._scheduler.GenerateTokens(request, timeout=LIMIT_S):
            got += i32(message.token).tolist()
        assert got == paced_tokens(prompt, Stop(tokens, ignore_eos=True), Sampling()).tokens
        self._until_idle()
        return Told(got, message.finished.usage.cached_tokens)

    def tiers(self) -> dict[str, kvstore_pb2.TierStats]:
        """By medium."""
        stats = self._store.Stats(kvstore_pb2.StatsRequest(), timeout=LIMIT_S)
        return {tier.medium: tier for tier in stats.tiers}

    def is_written(self) -> bool:
        """Whether all that the kvstore has taken is in Redis."""
        tiers = self.tiers()
        return tiers["redis"].stored == tiers["ram"].stored

    def dealt_with(self) -> int:
        """Pages that the kvstore was given, and those that left without."""
        with urllib.request.urlopen(self._metrics, timeout=LIMIT_S) as answer:
            text = answer.read().decode()
        counts = re.findall(r"^quire_scheduler_offload_pages_total\{.*\} ([0-9.e+]+)$", text, re.MULTILINE)
        return int(sum(map(float, counts)))

    def at_rest(self) -> bool:
        """Nobody holds a lease or puts."""
        stats = self._store.Stats(kvstore_pb2.StatsRequest(), timeout=LIMIT_S)
        return not (stats.leases or stats.pending_puts)

    def _until_idle(self) -> None:
        call = self._scheduler.WatchLoad(scheduler_pb2.WatchLoadRequest(interval_ms=10), timeout=LIMIT_S)
        for load in call:
            if not (load.running or load.waiting or load.referenced_pages):
                call.cancel()
                break
        until(self.at_rest)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def start(tmp_path: Path, redis_server: RedisServer) -> Iterator[Callable[..., Stack]]:
    """One stack, with flags of its scheduler."""
    with contextlib.ExitStack() as started:

        def begin(*flags: str) -> Stack:
            stack = Stack(tmp_path / "pages", redis_server.url, *flags)
            started.callback(stack.close)
            return stack

        yield begin


def talk(stack: Stack, *, stored: bool) -> list[list[int]]:
    """Everybody asks once; returns what was said. `stored`: each waits until all of it is in Redis, since the kvstore
    takes no page that would push out one which has not been written; else until what had to leave the device was
    dealt with, and written."""
    said = [np.random.default_rng(user).integers(3, 32_000, PROMPT).tolist() for user in range(USERS)]
    for user, prompt in enumerate(said):
        told = stack.ask(prompt, ANSWER)
        assert told.cached == 0
        prompt += told.tokens
        if stored:
            whole = (user + 1) * PAGES
            until(lambda whole=whole: stack.tiers()["redis"].stored >= whole)  # type: ignore[misc]  # binds the loop's variable
        else:
            left = (user + 1) * PAGES - DEVICE_PAGES
            until(lambda left=left: stack.dealt_with() >= left and stack.is_written())  # type: ignore[misc]  # as above
    return said


def test_returning_prompts_are_found_in_memory_disk_and_redis(start: Callable[..., Stack]) -> None:
    stack = start()
    said = talk(stack, stored=True)
    before, found = stack.tiers(), dict[str, list[int]]()
    for user in reversed(range(USERS)):
        told = stack.ask([*said[user], *range(10, 10 + MORE)], 1)
        assert told.cached == PAGES * PAGE, "nothing but what is new was computed"
        after = stack.tiers()
        came = {medium for medium in after if after[medium].hits > before[medium].hits}
        before = after
        for medium in came or {"device"}:
            found.setdefault(medium, []).append(user)
    assert set(found) == {"device", "ram", "disk", "redis"}
    assert min(found["device"]) > max(found["redis"]), "the last are still on the device, the first only in Redis"


def test_pages_stored_on_evict_are_found(start: Callable[..., Stack]) -> None:
    """It may leave before it could be stored, on a machine that is busy: most of it must not."""
    stack = start("--kvstore-offload=on-evict")
    said = talk(stack, stored=False)
    until(stack.is_written)
    assert stack.tiers()["ram"].stored < USERS * PAGES, "what stays is not stored"
    cached = [stack.ask([*said[user], *range(10, 10 + MORE)], 1).cached for user in range(USERS)]
    assert sum(cached) > 0.6 * USERS * PAGES * PAGE
