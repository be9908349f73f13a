"""ApiKeys: authenticates callers by API keys. Keys are stored as hashes and compared in constant time. A key's tenant
is a digest, never the key.

Digests are plain SHA-256. A key is 256 random bits (`quire key` makes them), so a slower hash would protect nothing,
and every request would pay for it. This module does not know whether a credential came from HTTP headers or gRPC
metadata. `key_file` reads the files.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
from typing import TYPE_CHECKING

from quire_common.errors import PermissionDenied, QuireError, Unauthenticated
from quire_common.identity.watched_files import WatchedFiles
from quire_common.telemetry.audit import ALLOWED, audit, bind_key_name
from quire_router.key_file import KeyFile, load_key_file
from quire_router.principal import DEFAULT_SCOPES, INFERENCE, NO_LIMITS, KeyLimits, Principal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_SCHEME = "bearer "


class ApiKeys:
    """The accepted keys. Without any key, every caller is accepted, as the tenant '' and within `default_limits`."""

    def __init__(
        self,
        keys: Iterable[str] = (),
        named: Iterable[tuple[bytes, Principal]] = (),
        default_limits: KeyLimits | None = None,
    ) -> None:
        limits = default_limits or NO_LIMITS
        plain = ((digest, _plain_principal(digest, limits)) for digest in map(_digest, keys))
        self._entries = [*plain, *named]
        self._everybody = Principal(limits=limits)
        self._limits = {principal.tenant: principal.limits for _, principal in self._entries}
        self._tenant_names = {principal.tenant: principal.tenant_name for _, principal in self._entries}
        self._file: WatchedFiles[ApiKeys] | None = None

    def follow(self, file: WatchedFiles[ApiKeys]) -> None:
        """Keep the file watch that calls `replace`."""
        self._file = file

    def replace(self, newest: ApiKeys) -> None:
        """Replace the accepted keys by those of `newest`. The limits of callers without a key stay. Callable from any
        thread."""
        self._entries, self._limits = newest._entries, newest._limits
        self._tenant_names = newest._tenant_names

    @property
    def limited(self) -> bool:
        """Whether a key, or the default, limits requests, tokens or concurrent sequences."""
        return self._everybody.limits.counted or any(principal.limits.counted for _, principal in self._entries)

    def kept_bytes(self, tenant: str) -> int:
        """Return how many bytes of a tenant's responses may be stored; 0: there is no limit."""
        limits = self._limits.get(tenant, self._everybody.limits)
        return limits.kept_responses_mib << 20

    def __bool__(self) -> bool:
        return bool(self._entries)

    def authenticate(self, authorization: str, scope: str = INFERENCE) -> Principal:
        """Return the principal of an `Authorization` value; without any keys, the principal of all callers. Raises
        Unauthenticated for a missing or unknown key, and PermissionDenied if the key lacks `scope`."""
        if not self._entries:
            return self._everybody
        found = self._find(_bearer_token(authorization))
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
        """Whether `authenticate` accepts this `Authorization` value for the scope. Raises nothing."""
        try:
            self.authenticate(authorization, scope)
        except (Unauthenticated, PermissionDenied):
            return False
        return True

    def name_of(self, authorization: str) -> str:
        """Return the name of the key in this `Authorization` value; empty if the key is missing, unknown or has no
        name. Raises nothing."""
        try:
            found = self._find(_bearer_token(authorization))
        except Unauthenticated:
            return ""
        return found.name if found is not None else ""

    def tenant_name(self, tenant: str) -> str:
        """Return the name of the tenant's keys; the tenant itself if they have no name."""
        return self._tenant_names.get(tenant, tenant)

    def _find(self, token: str) -> Principal | None:
        """Return the principal of the key `token`, or None. All keys are compared, so that the time does not show which
        key matches."""
        digest, found = _digest(token), None
        for accepted, principal in self._entries:  # every one, so that the time says nothing about which matched
            if hmac.compare_digest(accepted, digest):
                found = principal
        return found


def load_api_keys(
    inline: Iterable[str],
    file: str,
    default_limits: KeyLimits | None = None,
    check: Callable[[ApiKeys], None] = lambda keys: None,
) -> ApiKeys:
    """Load the keys of the flag (`inline`) and of the key file, if `file` names one. When the file changes, the keys
    are loaded again and replace the old ones; if that fails, the failure is logged and the old ones stay. Keys without
    limits of their own get `default_limits`.

    Raises ConfigError for a file that cannot be read, is malformed, or has no key or, in YAML, too many, and any error
    that `check` raises for the loaded keys. `check` also runs at each later load, in the thread that watches files; its
    error is then a failure as above.
    """
    limits, inline = default_limits or NO_LIMITS, tuple(inline)

    def load() -> ApiKeys:
        """Read the key file, if there is one, and return the keys with those of the flag. Raises the errors of
        `load_key_file` and of `check`."""
        content = load_key_file(file, limits) if file else KeyFile()
        keys = ApiKeys([*inline, *content.plain], content.named, limits)
        check(keys)
        return keys

    keys = load()
    if file:
        keys.follow(WatchedFiles("API keys", [file], load, keys.replace))
    return keys


@contextlib.contextmanager
def audited(keys: ApiKeys, authorization: str, action: str, peer: str = "") -> Iterator[None]:
    """Write the outcome of an administration call to the audit log when the `with` block ends: allowed, the code of its
    QuireError, CANCELLED or INTERNAL. The key's name, '' if it is not known, is bound to the log before. Exceptions
    pass on."""
    outcome = ALLOWED
    bind_key_name(keys.name_of(authorization))
    try:
        yield
    except QuireError as error:
        outcome = error.code
        raise
    except asyncio.CancelledError:
        outcome = "CANCELLED"
        raise
    except BaseException:
        outcome = "INTERNAL"
        raise
    finally:
        audit(action, outcome, peer=peer)


def _bearer_token(authorization: str) -> str:
    """Return the key in an `Authorization: Bearer` value. Raises Unauthenticated if it is empty or not a bearer
    token."""
    if not authorization:
        raise Unauthenticated(
            "MISSING_API_KEY", "This server needs an API key.", "Send the header Authorization: Bearer <key>."
        )
    if authorization[: len(_SCHEME)].lower() != _SCHEME:
        raise Unauthenticated(
            "INVALID_API_KEY", "The Authorization header is not a bearer token.", "Write Authorization: Bearer <key>."
        )
    return authorization[len(_SCHEME) :].strip()


def _plain_principal(digest: bytes, limits: KeyLimits) -> Principal:
    """Make the principal of a key without a name, with the default scopes: its tenant is a digest of the key's
    digest."""
    tenant = hashlib.sha256(b"tenant:" + digest).hexdigest()[:16]
    return Principal(tenant, "", DEFAULT_SCOPES, limits)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
