"""API keys: kept as hashes, compared in constant time. A key's tenant is a digest, never the key.

Digests are plain SHA-256: a key is 256 random bits (`quire key` makes them), so there is nothing that a slower hash
would protect, and every request pays for the hash. Knows nothing of where the credential came from: HTTP headers and
gRPC metadata both end here. Files are read by `key_file`.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

from quire_common.errors import PermissionDenied, Unauthenticated
from quire_router.key_file import load_key_file
from quire_router.principal import DEFAULT_SCOPES, INFERENCE, KeyLimits, Principal

if TYPE_CHECKING:
    from collections.abc import Iterable

_SCHEME = "bearer "


class ApiKeys:
    """The keys that may enter. Without any, everybody may, as the tenant '' and within `default_limits`."""

    def __init__(
        self,
        keys: Iterable[str] = (),
        named: Iterable[tuple[bytes, Principal]] = (),
        default_limits: KeyLimits | None = None,
    ) -> None:
        limits = default_limits or KeyLimits()
        plain = ((digest, _plain(digest, limits)) for digest in map(_digest, keys))
        self._entries = [*plain, *named]
        self._everybody = Principal(limits=limits)

    @property
    def limited(self) -> bool:
        """Whether anybody has a limit."""
        return bool(self._everybody.limits) or any(principal.limits for _, principal in self._entries)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def authenticate(self, authorization: str, scope: str = INFERENCE) -> Principal:
        """Who sent an `Authorization` value; raises Unauthenticated, or PermissionDenied where the scope is missing."""
        if not self._entries:
            return self._everybody
        found = self._find(_token(authorization))
        if found is None:
            raise Unauthenticated("INVALID_API_KEY", "The API key is not known here.", "Check the key.")
        if scope not in found.scopes:
            raise PermissionDenied(
                "SCOPE_MISSING",
                f"This API key has no scope `{scope}`.",
                "Use another key, or add the scope to this one in the key file.",
            )
        return found

    def admit(self, authorization: str, scope: str = INFERENCE) -> bool:
        """Whether `authenticate` would let it in."""
        try:
            self.authenticate(authorization, scope)
        except (Unauthenticated, PermissionDenied):
            return False
        return True

    def _find(self, token: str) -> Principal | None:
        digest, found = _digest(token), None
        for accepted, principal in self._entries:  # every one, so that the time says nothing about which matched
            if hmac.compare_digest(accepted, digest):
                found = principal
        return found


def load_api_keys(inline: Iterable[str], file: str, default_limits: KeyLimits | None = None) -> ApiKeys:
    """Keys of the flag and of the file; raises ConfigError for a file that cannot be read or holds none."""
    limits = default_limits or KeyLimits()
    if not file:
        return ApiKeys(inline, (), limits)
    content = load_key_file(file, limits)
    return ApiKeys([*inline, *content.plain], content.named, limits)


def _token(authorization: str) -> str:
    if not authorization:
        raise Unauthenticated(
            "MISSING_API_KEY", "This server needs an API key.", "Send the header Authorization: Bearer <key>."
        )
    if authorization[: len(_SCHEME)].lower() != _SCHEME:
        raise Unauthenticated(
            "INVALID_API_KEY", "The Authorization header is no bearer token.", "Write Authorization: Bearer <key>."
        )
    return authorization[len(_SCHEME) :].strip()


def _plain(digest: bytes, limits: KeyLimits) -> Principal:
    tenant = hashlib.sha256(b"tenant:" + digest).hexdigest()[:16]
    return Principal(tenant, "", DEFAULT_SCOPES, limits)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
