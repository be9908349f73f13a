"""PageMac: the MAC of a KV page, made with keyed BLAKE3 under the cluster's keys. PageMac does not know the format of a
page.

BLAKE3 was chosen for two reasons. A page is written once and read for days. GMAC breaks if a nonce is used twice under
one key, so it would need a stored nonce for each page. Of the MACs without a nonce, BLAKE3 is the fastest
(bench/LOG.md).

The first key makes MACs, and every key verifies them. Each MAC is stored with the number of its key. So one check with
the right key suffices, and the header shows whether a page has a MAC under another key than the first.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blake3 import blake3

from quire_common.config import read_secret
from quire_common.errors import ConfigError
from quire_common.identity.watched_files import WatchedFiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

MAC_BYTES = 16
KEY_HELP = (
    "keys of pages' MACs, the same for all workers and kvstores, 64 hexadecimal digits each: the first makes MACs, all "
    "verify; empty: pages have checksums alone"
)
KEY_FILE_HELP = "file with the value of --page-mac-key, read again when it changes"
_KEY = re.compile(r"[0-9a-fA-F]{64}")
_NUMBERS = (1 << 16) - 1


@dataclass(frozen=True)
class _Key:
    """A key. Page headers name it by `number`; 0 stands for no key."""

    secret: bytes = field(repr=False)
    number: int

    @classmethod
    def of(cls, secret: bytes) -> _Key:
        digest = hashlib.blake2b(key=secret, person=b"quire page key", digest_size=4).digest()
        return cls(secret, 1 + int.from_bytes(digest, "little") % _NUMBERS)


class PageMac:
    """Makes and verifies MACs. Safe to use from any thread; the keys may change between two calls."""

    def __init__(self, keys: Callable[[], tuple[_Key, ...]]) -> None:
        self._keys = keys

    @classmethod
    def from_config(cls, keys: str, keys_file: str = "") -> PageMac | None:
        """Return the PageMac of these keys; None if `keys` is empty. The first key makes MACs. If `keys_file` is given,
        the keys are read from that file instead, and its changes take effect while the process runs. Raises ConfigError
        for a key that is not 64 hexadecimal digits, or a file that cannot be read."""
        if not keys:
            return None
        if keys_file:
            watched = WatchedFiles("page MAC keys", [keys_file], lambda: _parse(read_secret(keys_file)))
            return cls(lambda: watched.value)
        parsed = _parse(keys)
        return cls(lambda: parsed)

    @property
    def key_number(self) -> int:
        """The number of the key that makes MACs now."""
        return self._keys()[0].number

    def make(self, *parts: Buffer) -> tuple[int, bytes]:
        """Return the number of the first key, and the MAC under it of the given parts, taken as one byte string."""
        key = self._keys()[0]
        return key.number, _mac(key, parts)

    def verify(self, key_number: int, mac: bytes, *parts: Buffer) -> bool:
        """Whether this is the MAC of these bytes under the key with this number. False if no key has this number."""
        return any(hmac.compare_digest(_mac(key, parts), mac) for key in self._keys() if key.number == key_number)


def _mac(key: _Key, parts: tuple[Buffer, ...]) -> bytes:
    """Return the keyed BLAKE3 digest, MAC_BYTES long, of the parts in a row."""
    state = blake3(key=key.secret)
    for part in parts:
        state.update(part)
    return state.digest(length=MAC_BYTES)


def _parse(text: str) -> tuple[_Key, ...]:
    """Parse keys, which are separated by commas or white space. Raises ConfigError if there is none, or one is not 64
    hexadecimal digits."""
    words = text.replace(",", " ").split()
    if not words or not all(_KEY.fullmatch(word) for word in words):
        raise ConfigError(
            "BAD_PAGE_MAC_KEY",
            "A page MAC key is not 64 hexadecimal digits.",
            "Make one with `openssl rand -hex 32`. Several keys are separated by commas or lines.",
            param="page_mac_key",
        )
    return tuple(_Key.of(bytes.fromhex(word)) for word in words)
