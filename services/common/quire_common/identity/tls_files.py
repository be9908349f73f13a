"""The PEM files of a TLS port: a certificate, its key, and the authority that clients must be signed by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire_common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths; empty: none. Without `ca`, a server asks its clients for no certificate."""

    cert: str = ""
    key: str = ""
    ca: str = ""

    @property
    def any_pair(self) -> bool:
        """Whether a certificate or a key is named. One without the other is an error of `read_server_files`."""
        return bool(self.cert or self.key)


@dataclass(frozen=True, slots=True)
class TlsContent:
    """What the files of a server contain. `ca` None: clients show no certificates."""

    cert: bytes
    key: bytes
    ca: bytes | None


def read_server_files(files: TlsFiles) -> TlsContent:
    """Read the files of a server. Raises ConfigError for a file that cannot be read."""
    key, cert = read_pem(files.key, "the TLS key"), read_pem(files.cert, "the TLS certificate")
    return TlsContent(cert, key, read_pem(files.ca, "the TLS authority") if files.ca else None)


def read_pem(path: str, what: str) -> bytes:
    """Read a PEM file. Raises ConfigError that names `what`."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            "TLS_FILE",
            f"Cannot read {what} {path!r}: {error.strerror}.",
            "Give the certificate and its key as PEM files.",
        ) from error
