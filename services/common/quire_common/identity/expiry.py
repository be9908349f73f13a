"""Reads the expiry of certificates from PEM files without a cryptography library. It parses only the DER field
`validity` (RFC 5280, 4.1)."""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from quire_common.telemetry.metrics import gauge

if TYPE_CHECKING:
    from collections.abc import Iterator

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18
_FORMATS = {_UTC_TIME: "%y%m%d%H%M%SZ", _GENERALIZED_TIME: "%Y%m%d%H%M%SZ"}
_expiry = gauge(
    "quire_certificate_expiry_timestamp_seconds",
    "Unix time at which the first certificate of a PEM file ends.",
    ("file",),
)
# Expiry times by file, the same as in the metric.
_ends: dict[str, float] = {}


def first_expiry() -> float:
    """Return the earliest Unix time at which a recorded certificate of this process expires; 0.0 if none is
    recorded."""
    return min(_ends.values(), default=0.0)


def record_expiry(path: str, pem: bytes) -> None:
    """Record the earliest expiry of the certificates in this file's PEM text, in the metric and for `first_expiry`.
    Does nothing for a text without a readable certificate."""
    ends = [end for found in _PEM.findall(pem.decode("latin-1")) if (end := _not_after(found)) is not None]
    if ends:
        _ends[path] = min(ends)
        _expiry.labels(path).set(_ends[path])


def _not_after(pem: str) -> float | None:
    """Return the Unix time at which a certificate expires; None if its DER is malformed."""
    try:
        der = ssl.PEM_cert_to_DER_cert(pem)
        (_, whole), *_ = _elements(der)
        (_, signed), *_ = _elements(whole)
        fields = [field for field in _elements(signed) if field[0] != _VERSION]
        # Serial number, signature algorithm, issuer, validity.
        _, (kind, text) = _elements(fields[3][1])
        # Two-digit years 50 to 99 mean the last century (RFC 5280); no current certificate has them.
        return datetime.strptime(text.decode("ascii"), _FORMATS[kind]).replace(tzinfo=UTC).timestamp()
    except (ValueError, KeyError, IndexError):
        return None


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tag and content of each DER element. Raises ValueError or IndexError if lengths do not fit."""
    at = 0
    while at < len(der):
        tag, size, at = der[at], der[at + 1], at + 2
        if size & 0x80:
            count = size & 0x7F
            size, at = int.from_bytes(der[at : at + count], "big"), at + count
        if at + size > len(der):
            raise ValueError("an element ends beyond its parent")
        yield tag, der[at : at + size]
        at += size
