"""API keys: kept as hashes, compared in constant time. A key's tenant is a digest of it, never the key.

Knows nothing of where the credential came from: HTTP headers and gRPC metadata both end here.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import TYPE_CHECKING

from quire_common.errors import ConfigError, Unauthenticated

if TYPE_CHECKING:
    from collections.abc import Iterable

_SCHEME = "bearer "


class ApiKeys:
    """The keys that may enter. Without any, everybody may, as the tenant ''."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._hashes = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def authenticate(self, authorization: str) -> str:
        """The tenant of an `Authorization` value; raises Unauthenticated."""
        if not self._hashes:
            return ""
        if not authorization:
            raise Unauthenticated(
                "MISSING_API_KEY", "This server needs an API key.", "Send the header Authorization: Bearer <key>."
            )
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            raise Unauthenticated(
                "INVALID_API_KEY", "The Authorization header is no bearer token.", "Write Authorization: Bearer <key>."
            )
        digest = _digest(authorization[len(_SCHEME) :].strip())
        known = False
        for accepted in self._hashes:  # every one, so that the time says nothing about which matched
            known |= hmac.compare_digest(accepted, digest)
        if not known:
            raise Unauthenticated("INVALID_API_KEY", "The API key is not known here.", "Check the key.")
        return hashlib.sha256(b"tenant:" + digest).hexdigest()[:16]

    def admit(self, authorization: str) -> bool:
        """Whether `authenticate` would let it in."""
        try:
            self.authenticate(authorization)
        except Unauthenticated:
            return False
        return True


def load_api_keys(inline: Iterable[str], file: str) -> ApiKeys:
    """Keys of the flag and of the file; raises ConfigError for a file that cannot be read or holds none."""
    keys = list(inline)
    if file:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                "API_KEY_FILE", f"Cannot read the API key file {file!r}.", "Give a UTF-8 file with one key per line."
            ) from error
        found = [line for line in map(str.strip, lines) if line and not line.startswith("#")]
        if not found:
            raise ConfigError("API_KEY_FILE", f"The API key file {file!r} has no key.", "Write one key per line.")
        keys += found
    return ApiKeys(keys)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
