"""Certificates for tests: an authority of its own, and what it signs for this host, as PEM files of a folder."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from quire_common.identity.callers import identity_uri, server_name

_HOUR = datetime.timedelta(hours=1)
HOST = "127.0.0.1"


class TlsFiles(NamedTuple):
    """Paths, for options of the same names: a certificate, its key, and the authority that peers must be signed by."""

    cert: str
    key: str
    ca: str


# The key may sign certificates and revocation lists.
_SIGNS = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


class Authority:
    """Signs for servers and clients of 127.0.0.1 alike."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._builder(self._name, self._key).add_extension(x509.BasicConstraints(True, 0), critical=True)
        certificate = certificate.add_extension(_SIGNS, critical=True)
        self.ca = str(folder / f"{name}.pem")
        self._write(self.ca, certificate)

    def files(self, name: str, identity: str = "", dns: Sequence[str] = (), life_s: float = 3600.0) -> TlsFiles:
        """A new certificate, with the URI and the DNS name of `identity` if that is given, and the names `dns`. Files
        that are there are replaced, each at once."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address(HOST))]
        names += map(x509.DNSName, dns)
        if identity:
            names += [x509.UniformResourceIdentifier(identity_uri(identity)), x509.DNSName(server_name(identity))]
        here = x509.SubjectAlternativeName(names)
        cert, key_file = str(self._folder / f"{name}.pem"), self._folder / f"{name}.key"
        form = serialization.PrivateFormat.PKCS8
        replace(key_file, key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
        self._write(cert, self._builder(subject, key, life_s).add_extension(here, critical=False))
        return TlsFiles(cert, str(key_file), self.ca)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, life_s: float = 3600.0
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _HOUR)
            .not_valid_after(now + datetime.timedelta(seconds=life_s))
            # Python 3.13 requires these of every certificate (VERIFY_X509_STRICT).
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )

    def _write(self, path: str, certificate: x509.CertificateBuilder) -> None:
        signed = certificate.sign(self._key, hashes.SHA256())
        replace(Path(path), signed.public_bytes(serialization.Encoding.PEM))


def replace(path: Path, content: bytes) -> None:
    """Put a file in the place of the one of this name."""
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(content)
    new.replace(path)
