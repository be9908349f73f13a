"""The file of API keys, in either of two forms: YAML with digests, names, scopes and limits, or one plain key per line.

    keys:
      - name: alice
        sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
        scopes: [inference]
        requests_per_minute: 600
        tokens_per_minute: 100000
        weight: 2
        models: [llama-8b]
        max_concurrent: 20
        highest_priority: 0
        kept_responses_mib: 16

Errors name the entry and what is wrong with it, never a key. This module knows nothing of requests.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_common.config import parse_yaml
from quire_common.errors import ConfigError
from quire_common.request_parameters import MAX_INT32
from quire_common.sequence import MAX_WEIGHT
from quire_router.principal import (
    DEFAULT_SCOPES,
    MOST_CONCURRENT,
    MOST_MIB,
    MOST_PER_MINUTE,
    SCOPES,
    KeyLimits,
    Principal,
)

_FIELDS = ("name", "sha256", "scopes", *KeyLimits.__dataclass_fields__)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
# What begins the YAML form.
_MAPPING = re.compile(r"keys\s*:")
# What no plain key has: a line of YAML that was taken for a key would let in whoever guesses it.
_NO_PLAIN_KEY = re.compile('[-{\\["\ufeff]|.*[\\s:]')
_MOST_KEYS = 10_000
# The least and greatest value of each limit.
_BOUNDS = {
    "requests_per_minute": (0, MOST_PER_MINUTE),
    "tokens_per_minute": (0, MOST_PER_MINUTE),
    "weight": (1, MAX_WEIGHT),
    "max_concurrent": (0, MOST_CONCURRENT),
    "highest_priority": (-MAX_INT32, MAX_INT32),
    "kept_responses_mib": (0, MOST_MIB),
}


@dataclass(frozen=True)
class KeyFile:
    """The content of a key file: plain keys, and digests with their principals."""

    plain: tuple[str, ...] = ()
    named: tuple[tuple[bytes, Principal], ...] = ()


def load_key_file(path: str, default_limits: KeyLimits) -> KeyFile:
    """Read a key file of either form: YAML that begins with `keys:`, or one plain key per line. Limits that a YAML
    entry leaves out are those of `default_limits`. An entry without `models` may use all models, and one without
    `scopes` has DEFAULT_SCOPES. Raises ConfigError for a file that cannot be read, is malformed, has no key or
    more than 10,000, or has a key twice."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "API_KEY_FILE",
            f"Cannot read the API key file {path!r}.",
            "Give a UTF-8 file with `keys:`, or one key per line.",
        ) from error
    lines = [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]
    if not lines:
        raise ConfigError("API_KEY_FILE", f"The API key file {path!r} has no key.", "Write one key per line.")
    if not _MAPPING.match(lines[0]):
        return KeyFile(plain=_plain_keys(path, text))
    try:
        loaded = parse_yaml(text)
    except ValueError:
        loaded = None  # the parser's message would quote the file
    entries = loaded.get("keys") if isinstance(loaded, dict) and set(loaded) == {"keys"} else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(
            "API_KEY_FILE", f"The API key file {path!r} has no YAML list under `keys`.", "See the router's README."
        )
    _check_count(path, len(entries))
    return KeyFile(
        named=_check_unique(path, [_parse_entry(path, i, entry, default_limits) for i, entry in enumerate(entries)])
    )


def _plain_keys(path: str, text: str) -> tuple[str, ...]:
    """Return the keys of a file with one key per line; empty lines and lines that begin with # are skipped. Raises
    ConfigError, naming the line, for a line that cannot be a key or repeats one, and for more than 10,000 keys."""
    keys: dict[str, None] = {}
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if not line or line.startswith("#"):
            continue
        if _NO_PLAIN_KEY.match(line):
            raise ConfigError(
                "API_KEY_FILE",
                f"Line {number} of {path!r} is not a plain key, and the file does not begin with `keys:`.",
                "Begin a YAML file with a line `keys:` and indent its entries, without a byte order mark; "
                "else write one key per line, without spaces, colons or quotes.",
            )
        if line in keys:
            raise ConfigError("API_KEY_FILE", f"Line {number} of {path!r} repeats a key.", "Remove the line.")
        keys[line] = None
    _check_count(path, len(keys))
    return tuple(keys)


def _check_count(path: str, count: int) -> None:
    """Raise ConfigError if a file of either form has more than 10,000 keys."""
    if count > _MOST_KEYS:
        raise ConfigError("API_KEY_FILE", f"{path!r} has {count} keys.", f"The limit is {_MOST_KEYS}.")


def _parse_entry(path: str, index: int, entry: Any, default_limits: KeyLimits) -> tuple[bytes, Principal]:
    """Check the fields of one entry of a YAML file: name, digest, scopes, limits within their bounds, and models.
    Returns the key's SHA-256 digest and its principal, whose tenant is a digest of the name. Scopes that are left out
    are the default ones, and limits those of `default_limits`; without the field `models`, all are allowed. Raises
    ConfigError, which names the entry, counted from 1, for an unknown, missing or wrong field, and for an empty list of
    scopes or models. The error tells an unknown field by its place in the entry, since its name may be a key."""

    def bad(cause: str, fix: str) -> ConfigError:
        return ConfigError("API_KEY_FILE", f"Key {index + 1} of {path!r}: {cause}.", fix)

    if not isinstance(entry, dict):
        raise bad("it is not a mapping", "Write name: and sha256:.")
    for place, field in enumerate(entry, 1):
        if field not in _FIELDS:
            raise bad(f"field {place} is unknown", f"Known fields: {', '.join(_FIELDS)}.")
    name, digest = entry.get("name"), entry.get("sha256")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad("its name is missing or not valid", "Use letters, digits, dots, dashes; 64 characters at most.")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise bad("sha256 is not 64 hexadecimal digits", "`quire key NAME` prints a key and its entry.")
    scopes = entry.get("scopes", sorted(DEFAULT_SCOPES))
    if not isinstance(scopes, list) or not scopes or any(scope not in SCOPES for scope in scopes):
        raise bad("scopes is not a list of known scopes", f"Choose from {', '.join(SCOPES)}.")
    limits = {field: entry.get(field, getattr(default_limits, field)) for field in _BOUNDS}
    for field, value in limits.items():
        least, most = _BOUNDS[field]
        if isinstance(value, bool) or not isinstance(value, int):
            raise bad(f"{field} is not a whole number", f"Give a number from {least} to {most}.")
        if not least <= value <= most:
            raise bad(f"{field} is not between {least} and {most}", "Give such a number, or leave the field out.")
    models = entry.get("models", [])
    if not isinstance(models, list) or not all(isinstance(model, str) and model for model in models):
        raise bad("models is not a list of names", "Write names as in /v1/models, or leave the field out.")
    if "models" in entry and not models:
        raise bad("models is empty", "Name a model, or leave the field out to allow all.")
    tenant = hashlib.sha256(b"tenant-name:" + name.encode()).hexdigest()[:16]
    return bytes.fromhex(digest), Principal(tenant, name, frozenset(scopes), KeyLimits(**limits, models=tuple(models)))


def _check_unique(path: str, entries: list[tuple[bytes, Principal]]) -> tuple[tuple[bytes, Principal], ...]:
    """Return the entries as a tuple. Raises ConfigError if a key occurs twice, which names both entries, or if entries
    of one name have different limits, since they share their limits."""
    by_name: dict[str, Principal] = {}
    for _, principal in entries:
        if by_name.setdefault(principal.name, principal).limits != principal.limits:
            raise ConfigError(
                "API_KEY_FILE",
                f"The keys named {principal.name!r} in {path!r} differ in their limits.",
                "Keys of one name share their limits: give them the same, or other names.",
            )
    by_digest: dict[bytes, str] = {}
    for number, (digest, principal) in enumerate(entries, 1):
        entry = f"{principal.name!r} (key {number})"
        if (first := by_digest.setdefault(digest, entry)) != entry:
            raise ConfigError(
                "API_KEY_FILE",
                f"{path!r} has a key twice: the entries {first} and {entry} have the same sha256.",
                "Remove one of them.",
            )
    return tuple(entries)
