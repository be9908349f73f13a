"""RedisBackend with a scripted Redis: which answers show that a value is no page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from quire_common.errors import ConfigError
from quire_kvstore.tiers import redis_backend
from quire_kvstore.tiers.backend import PageJob
from quire_kvstore.tiers.redis_address import RedisAddress
from quire_kvstore.tiers.redis_backend import RedisBackend, redis_key
from quire_kvstore.tiers.redis_connection import ErrorReply
from tests.unit.kvstore.pages import chain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_kvstore.tiers.redis_connection import Argument, Reply

HOST = "store.example"
KEY = chain("a", 1).key(0)


class ScriptedConnection:
    """Answers every command with an error, and notes the keys of deletes."""

    def __init__(self, error: str) -> None:
        self._error = error
        self.deleted: list[Argument] = []

    def execute(self, commands: Sequence[Sequence[Argument]]) -> list[Reply]:
        for name, *keys in commands:
            if name == b"DEL":
                self.deleted += keys
        return [ErrorReply(self._error) for _ in commands]

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "damaged"),
    [
        ("LOADING Redis is loading the dataset in memory", False),
        ("NOAUTH Authentication required.", False),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", True),
    ],
)
def test_only_the_error_of_a_value_deletes_the_value(
    error: str, damaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = ScriptedConnection(error)
    monkeypatch.setattr(redis_backend, "RedisConnection", lambda address, timeout_s: connection)
    backend = RedisBackend(RedisAddress, ttl_s=60, timeout_s=1.0, retry_s=0.0, max_page_bytes=4096)
    backend.maintain()
    assert backend.available
    missed: list[PageJob] = []
    backend.read([PageJob(KEY, 0)], lambda job, size: None, lambda job, framed: missed.append(job))
    assert [job.key for job in missed] == [KEY], "the page is a miss"
    assert backend.counts.snapshot().corrupt == int(damaged)
    assert connection.deleted == ([redis_key(KEY)] if damaged else [])
    backend.close()


@pytest.mark.parametrize(
    "url",
    [
        f"redis://carol:hunter2/x@{HOST}",
        f"redis://carol/hunter2@{HOST}:1/0",
        f"redis://hunter2:12/x@{HOST}?db=3",
        f"redis://hunter2:12#x@{HOST}",
        f"redis://carol:12?hunter2@{HOST}",
        f"redis://carol:12?hunter2=x@{HOST}",
        f"redis://carol:12?db=hunter2@{HOST}",
        f"redis://carol:[hunter2]@{HOST}",
        f"redis://carol:hunter2\u2100@{HOST}",
        f"hunter2:x@{HOST}",
        f"redis://carol:hunter2@{HOST}:port",
    ],
)
def test_refused_address_shows_no_part_of_user_and_password(url: str) -> None:
    with pytest.raises(ConfigError, match="redis_url is not the URL of a Redis") as caught:
        RedisAddress.parse(url)
    error: BaseException | None = caught.value
    while error is not None:
        assert "hunter2" not in str(error) and "carol" not in str(error)
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("memcached://user:secret@host", "'memcached'"),
        ("redis://user:secret@host/first", "'first'"),
        ("redis://host?db=0&colour=red", "'colour'"),
    ],
)
def test_refused_address_shows_what_is_wrong_behind_the_password(url: str, shown: str) -> None:
    with pytest.raises(ConfigError, match=shown):
        RedisAddress.parse(url)
