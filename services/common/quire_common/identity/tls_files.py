"""TlsFiles: the PEM files of a TLS port. They are a certificate, its key, and the authority that must have signed the
clients' certificates."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from quire_common.errors import ConfigError
from quire_common.identity.expiry import record_expiry


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths; empty: none. Without `ca`, a server asks its clients for no certificate."""

    cert: str = ""
    key: str = ""
    ca: str = ""

    @property
    def any_pair(self) -> bool:
        """Whether a certificate or a key is named. One without the other is an error of `read_tls_files`."""
        return bool(self.cert or self.key)

    @property
    def paths(self) -> tuple[str, ...]:
        """The files that are named."""
        return tuple(path for path in (self.cert, self.key, self.ca) if path)


@dataclass(frozen=True, slots=True)
class TlsContent:
    """The contents of the files; None for a file that is not named."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None


def read_tls_files(files: TlsFiles) -> TlsContent:
    """Return the contents of the files, after checking that a server can use them; the times at which the certificates
    expire are recorded. Raises ConfigError for a file that cannot be read or is no PEM, a certificate without its key,
    and a key that is another certificate's or has a passphrase."""
    server_context(files)
    return TlsContent(
        read_pem(files.cert, "the TLS certificate") if files.any_pair else None,
        read_pem(files.key, "the TLS key") if files.any_pair else None,
        read_pem(files.ca, "the TLS authority") if files.ca else None,
    )


def server_context(files: TlsFiles, clients: ssl.VerifyMode = ssl.CERT_REQUIRED) -> ssl.SSLContext:
    """Make the SSL context of a server with these files, and record when the certificates expire. If there is an
    authority, clients' certificates are verified by it, and `clients` says whether a client needs one. Raises
    ConfigError as `read_tls_files` does."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    if files.any_pair:
        certificate = read_pem(files.cert, "the TLS certificate")
        read_pem(files.key, "the TLS key")
        try:
            context.load_cert_chain(files.cert, files.key, password="")  # or OpenSSL would ask on the terminal
        except (OSError, ValueError) as error:
            raise ConfigError(
                "TLS_FILE",
                f"{files.cert!r} and {files.key!r} are not a certificate and its key.",
                "Give both as PEM files, the key without a passphrase.",
            ) from error
        record_expiry(files.cert, certificate)
    if files.ca:
        authority = read_pem(files.ca, "the TLS authority")
        try:
            context.load_verify_locations(files.ca)
        except (OSError, ValueError) as error:
            raise ConfigError(
                "TLS_FILE", f"{files.ca!r} has no certificate of an authority.", "Give it as a PEM file."
            ) from error
        context.verify_mode = clients
        record_expiry(files.ca, authority)
    return context


def read_pem(path: str, what: str, *, param: str = "") -> bytes:
    """Return the bytes of a file, unchecked. Raises ConfigError for a file that cannot be read; its message names
    `what`, and `param` is the option."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            "TLS_FILE",
            f"Cannot read {what}, {path!r}: {error.strerror}.",
            "Name a PEM file that the service may read.",
            param=param,
        ) from error
