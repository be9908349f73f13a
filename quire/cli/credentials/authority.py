"""Authority: a certificate authority, as PEM files of a folder, and the certificates that it signs.

It is for development and for stacks of one owner. It needs the package `cryptography`, the extra `quire[certs]`.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from quire.errors import InvalidArgument

_BOTH = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
# Clocks of machines differ.
_BEFORE = datetime.timedelta(hours=1)


class Authority:
    """A certificate authority. Its key signs certificates of services (`issue_identity`) or of public ports
    (`issue_public`)."""

    def __init__(self, folder: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._folder = folder
        self._certificate = certificate
        self._key = key

    @classmethod
    def in_folder(cls, folder: Path, name: str, days: int) -> Self:
        """Return the authority whose files `NAME.pem` and `NAME.key` are in the folder. If one is missing, make a new
        authority for this number of days, and write both files, also over the other one. Raises InvalidArgument if
        files that are there cannot be read, or the key is not the elliptic-curve key of the certificate. The dates of
        an existing authority are not checked."""
        pem, key_file = folder / f"{name}.pem", folder / f"{name}.key"
        if pem.exists() and key_file.exists():
            return cls(folder, *_load(pem, key_file))
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _named(f"Quire {name}")
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)  # signs, and revokes
        builder = _builder(subject, subject, key.public_key(), key.public_key(), days)
        builder = builder.add_extension(x509.BasicConstraints(True, 0), critical=True)
        certificate = builder.add_extension(usage, critical=True).sign(key, hashes.SHA256())
        _write_pair(folder, name, certificate, key)
        return cls(folder, certificate, key)

    def issue_identity(self, name: str, uri: str, dns: str, days: int) -> None:
        """Write `NAME.pem` and `NAME.key` of a service, which is a server and a client. The certificate has the URI
        that is the service's identity, and the DNS name that its clients expect."""
        self._issue(name, [x509.UniformResourceIdentifier(uri), x509.DNSName(dns)], _BOTH, days)

    def issue_public(self, name: str, hosts: Sequence[str], days: int) -> None:
        """Write `NAME.pem` and `NAME.key` of a server that clients reach under these host names and IP addresses."""
        self._issue(name, [_general_name(host) for host in hosts], _BOTH[:1], days)

    def _issue(
        self, name: str, names: Sequence[x509.GeneralName], usages: Sequence[x509.ObjectIdentifier], days: int
    ) -> None:
        """Make a key and a certificate with these alternative names and usages, signed by this authority, and write
        both to its folder as `NAME.key` and `NAME.pem`."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_named(name), self._certificate.subject, key.public_key(), self._key.public_key(), days)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        builder = builder.add_extension(x509.BasicConstraints(False, None), critical=True)
        _write_pair(self._folder, name, builder.sign(self._key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePublicKey,
    days: int,
) -> x509.CertificateBuilder:
    """Return the unsigned certificate of `key`, valid from an hour ago for `days` days, with a random serial number and
    the identifiers of both keys."""
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + datetime.timedelta(days=days))
        # Python 3.13 requires these of every certificate (VERIFY_X509_STRICT).
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def _load(pem: Path, key_file: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return an authority's certificate and its private key. Raises InvalidArgument if a file cannot be read, or if the
    key is not the elliptic-curve key of the certificate."""
    try:
        certificate = x509.load_pem_x509_certificate(pem.read_bytes())
        key = serialization.load_pem_private_key(key_file.read_bytes(), None)
    except (OSError, ValueError, TypeError):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise InvalidArgument(
            "BAD_AUTHORITY",
            f"{pem} and {key_file} are not an authority that `quire certs` made.",
            "Name another folder, or remove both files.",
        )
    return certificate, key


def _named(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(host: str) -> x509.GeneralName:
    """Return the host as an IP address, or else as a DNS name. Any ASCII text counts as a DNS name. Raises
    InvalidArgument for a name with characters beyond ASCII."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise InvalidArgument(
            "BAD_VALUE", f"{host!r} is not a host name.", "Give names like api.example.org, or IP addresses."
        ) from None


def _write_pair(folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    """Write a key, which only this user can read, and then its certificate. Each file is replaced at once, so that a
    service never reads half of a file."""
    form, encoding = serialization.PrivateFormat.PKCS8, serialization.Encoding.PEM
    replace_file(folder / f"{name}.key", key.private_bytes(encoding, form, serialization.NoEncryption()), 0o600)
    replace_file(folder / f"{name}.pem", certificate.public_bytes(encoding), 0o644)


def replace_file(path: Path, content: bytes, mode: int) -> None:
    """Write a new file with these permissions, less the umask, and put it in the place of `path` in one step."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    new.touch(mode, exist_ok=False)
    new.write_bytes(content)
    new.replace(path)
