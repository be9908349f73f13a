"""Targets: the file of API keys, and what a Redis has under our keys: others may write there, and releases differ."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING

from redis import Redis

from quire_common.discovery.redis_discovery import RedisDiscovery, RedisSettings
from quire_common.errors import ConfigError
from quire_router.key_file import load_key_file
from quire_router.principal import KeyLimits
from tests.fuzz.changes.byte_changes import changed_bytes
from tests.fuzz.changes.json_changes import changed_json, is_json
from tests.fuzz.target import Outcome, Target, check_error
from tests.redis_server import RedisServer
from tests.unit.kvstore.pages import chain, framed, put
from tests.unit.kvstore.tiers import eventually, forget_memory, found, tier, tiered

if TYPE_CHECKING:
    from pathlib import Path

_TEXT_OF_FIELDS = """
    name sha256 scopes inference admin requests_per_minute tokens_per_minute weight models max_concurrent
    highest_priority kept_responses_mib keys 2001-99-99 !!python/object:os.system &a *a 0x7fffffffffffffffff 1e400
    ~ <<
    """
_MOST_LINES = 40
_FIELDS = (*_TEXT_OF_FIELDS.split(),)


class KeyFileTarget(Target):
    """The file of API keys in both forms. JSON is YAML too, so changes of JSON stay readable."""

    covers = ("router/quire_router/key_file.py",)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._path = folder / "keys"

    def seeds(self) -> list[bytes]:
        entries = [
            {"name": "alice", "sha256": "9f" * 32, "scopes": ["inference"], "requests_per_minute": 600, "weight": 2},
            {"name": "bob", "sha256": "8e" * 32, "models": ["a"], "max_concurrent": 20, "highest_priority": -1},
        ]
        block = "keys:\n  - name: alice\n    sha256: " + "9f" * 32 + "\n    scopes: [inference, admin]\n    weight: 2\n"
        return [b"keys: " + json.dumps(entries).encode(), block.encode(), b"sk-first\n# a comment\nsk-second\n"]

    def mutate(self, data: bytes, choose: random.Random) -> bytes:
        if choose.random() < 0.2:
            data = choose.choice(self.seeds())  # changes of changes soon are no YAML
        if data.startswith(b"keys: ["):
            return b"keys: " + changed_json(data[6:], choose, _FIELDS)
        lines = data.split(b"\n")
        at = choose.randrange(len(lines))
        head, colon, _ = lines[at].partition(b":")
        if choose.random() < 0.7 and colon:
            lines[at] = head + b": " + choose.choice(_FIELDS).encode()
        elif choose.random() < 0.5:
            lines.insert(at, choose.choice(lines))
            del lines[_MOST_LINES:]  # files that grow take long, and show nothing new
        else:
            lines[at] = changed_bytes(lines[at], choose)
        return b"\n".join(lines)

    def run(self, data: bytes) -> Outcome:
        self._path.write_bytes(data)
        try:
            load_key_file(str(self._path), KeyLimits())
        except ConfigError as error:
            check_error(error)
            entry = (
                error.message.startswith("Key ")
                or "differ in their limits" in error.message
                or "is twice" in error.message
            )
            return Outcome.REFUSED if entry else Outcome.UNREADABLE
        return Outcome.ACCEPTED


class RedisTarget(Target):
    """A target with a Redis of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        server = RedisServer()
        self.closing.callback(server.close)
        server.start()
        self._url = server.url
        self._redis = self.closing.enter_context(Redis.from_url(server.url))


class RedisEndpointTarget(RedisTarget):
    """The JSON of an instance in a Redis of discovery. One that cannot be read is skipped, and others stay listed."""

    covers = ("common/quire_common/discovery/redis_discovery.py",)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._redis.sadd("quire:instances:worker", "good", "changed")
        self._redis.set("quire:endpoint:worker:good", json.dumps({"address": "127.0.0.1:1", "metadata": {}}))
        self._loop = asyncio.new_event_loop()
        self._discovery = RedisDiscovery(RedisSettings.parse(self._url))
        self.closing.callback(self._loop.close)
        self.closing.callback(lambda: self._loop.run_until_complete(self._discovery.close()))

    def seeds(self) -> list[bytes]:
        metadata = {"model": "demo", "version": "0.1.0", "role": "both"}
        return [json.dumps({"address": "127.0.0.1:50052", "metadata": each}).encode() for each in (metadata, {})]

    def mutate(self, data: bytes, choose: random.Random) -> bytes:
        if choose.random() < 0.3:
            data = choose.choice(self.seeds())
        return changed_json(data, choose, ("address", "metadata", "127.0.0.1:1"))

    def run(self, data: bytes) -> Outcome:
        self._redis.set("quire:endpoint:worker:changed", data)
        listed, _ = self._loop.run_until_complete(self._discovery._read("worker"))
        assert "good" in listed, "an endpoint that is right was lost"
        if "changed" in listed:
            return Outcome.ACCEPTED
        return Outcome.REFUSED if is_json(data) else Outcome.UNREADABLE


class RedisPageTarget(RedisTarget):
    """A page of the kvstore's Redis tier. A damaged one is a miss, and deleted; the store goes on."""

    covers = ("kvstore/quire_kvstore/tiers/redis_backend.py",)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._store = self.closing.enter_context(tiered(redis_url=self._url))
        self._run = chain("fuzz", 1)
        eventually(lambda: tier(self._store, "redis").available)
        assert put(self._store, self._run) == (1, 0)
        self._store.flush(30)
        (self._key,) = self._redis.keys()

    def seeds(self) -> list[bytes]:
        return [framed(self._run, 0)]

    def mutate(self, data: bytes, choose: random.Random) -> bytes:
        return changed_bytes(data, choose) if data else framed(self._run, 0)

    def run(self, data: bytes) -> Outcome:
        forget_memory(self._store)
        self._redis.set(self._key, data)
        pages, _ = found(self._store, self._run)
        if data == framed(self._run, 0):
            assert pages == 1
        return (
            Outcome.ACCEPTED
            if pages
            else Outcome.REFUSED
            if data[:4] == framed(self._run, 0)[:4]
            else Outcome.UNREADABLE
        )
