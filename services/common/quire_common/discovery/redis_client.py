"""Opens asyncio clients of a Redis. User and password follow changes of the URL's file, if there is one; host and port
do not."""

from __future__ import annotations

import contextlib
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from redis.asyncio import Redis
from redis.credentials import CredentialProvider

from quire_common.config import read_secret
from quire_common.errors import ConfigError
from quire_common.identity.watched_files import WatchedFiles

_FIX = "Write redis://user:password@host:6379/0, with user and password percent-encoded."


def open_redis(url: str, url_file: str = "", **options: Any) -> Any:  # redis publishes types in part
    """Return an asyncio client of the Redis at `url`. It connects at its first command. If the URL has a
    password and came from `url_file`, the file is watched (see WatchedFiles), and each new connection logs in with the
    user and password that were last read from it. Otherwise the URL is used as it is. `options` go to the client.
    Raises ConfigError if the file cannot be read now; later failures keep the former user and password. Also raises
    ConfigError for a malformed URL, and shows no part of it: the library's text may quote the password."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        # A "/", "?" or "#" in a password ends the host too early. The path of a Unix socket may have an "@".
        if "@" not in parts.query + parts.fragment and (parts.scheme == "unix" or "@" not in parts.path):
            if not url_file or not parts.password:
                return Redis.from_url(url, **options)
            bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
            return Redis.from_url(bare, credential_provider=_FileCredentials(url_file), **options)
    raise ConfigError("BAD_REDIS_URL", "The URL of the Redis is malformed.", _FIX)


class _FileCredentials(CredentialProvider):
    def __init__(self, path: str) -> None:
        self._watched = WatchedFiles("Redis URL", [path], lambda: _credentials(read_secret(path)))

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        return self._watched.value

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self._watched.value


def _credentials(url: str) -> tuple[str] | tuple[str, str]:
    """Return user and password of a Redis URL; the password alone if the URL names no user."""
    parts = urlsplit(url)
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    return (user, password) if user else (password,)
