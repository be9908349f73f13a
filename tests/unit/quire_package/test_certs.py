"""`quire certs`: its certificates have the names that the services look for, and its authorities stay."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from quire.__main__ import EXIT_INTERRUPTED, main
from quire.cli.credentials.certs import IDENTITIES
from quire.local.service_tls import service_flags
from quire.local.spec import SERVICES
from quire_common.identity import callers
from quire_common.identity.callers import identity_uri, server_name
from quire_common.kv.page_mac import PageMac

Capture = pytest.CaptureFixture[str]


def certificate(folder: Path, name: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes())


def names(
    folder: Path, name: str, kind: type[x509.DNSName | x509.UniformResourceIdentifier | x509.IPAddress]
) -> list[str]:
    alternative = certificate(folder, name).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return list(map(str, alternative.value.get_values_for_type(kind)))


def test_each_identity_gets_its_names_and_signs_for_server_and_client(tmp_path: Path) -> None:
    assert IDENTITIES == callers.IDENTITIES
    assert main(["certs", str(tmp_path / "certs")]) == 0
    folder = tmp_path / "certs"
    for identity in IDENTITIES:
        assert names(folder, identity, x509.UniformResourceIdentifier) == [identity_uri(identity)]
        assert names(folder, identity, x509.DNSName) == [server_name(identity)]
        certificate(folder, identity).verify_directly_issued_by(certificate(folder, "ca"))
        usage = certificate(folder, identity).extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert set(usage) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
        pair = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        pair.load_cert_chain(folder / f"{identity}.pem", folder / f"{identity}.key")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.key")} == {0o600}


def test_pages_get_a_key_that_stays(tmp_path: Path) -> None:
    assert "page-mac-key-file" not in service_flags(str(tmp_path), "worker"), "a folder of before"
    assert main(["certs", str(tmp_path)]) == main(["certs", str(tmp_path / "other")]) == 0
    key = (tmp_path / "page_mac.key").read_text()
    assert PageMac.from_config(key.strip()) is not None
    assert key != (tmp_path / "other" / "page_mac.key").read_text()
    assert main(["certs", str(tmp_path)]) == 0 and (tmp_path / "page_mac.key").read_text() == key
    given = {service for service in SERVICES if "page-mac-key-file" in service_flags(str(tmp_path), service)}
    assert given == {"worker", "kvstore"}


def test_the_public_certificate_has_an_authority_and_hosts_of_its_own(tmp_path: Path) -> None:
    assert main(["certs", str(tmp_path), "--host", "api.example.org", "--host", "192.0.2.7"]) == 0
    assert {"localhost", "api.example.org"} <= set(names(tmp_path, "public", x509.DNSName))
    assert {"127.0.0.1", "::1", "192.0.2.7"} == set(names(tmp_path, "public", x509.IPAddress))
    assert names(tmp_path, "public", x509.UniformResourceIdentifier) == [], "no identity"
    certificate(tmp_path, "public").verify_directly_issued_by(certificate(tmp_path, "public-ca"))
    with pytest.raises(ValueError):
        certificate(tmp_path, "public").verify_directly_issued_by(certificate(tmp_path, "ca"))


def test_a_second_run_renews_certificates_under_the_same_authorities(tmp_path: Path) -> None:
    serials = []
    for _ in range(2):
        assert main(["certs", str(tmp_path), "--days", "7"]) == 0
        serials.append({name: certificate(tmp_path, name).serial_number for name in ("ca", "public-ca", "worker")})
    assert serials[0]["worker"] != serials[1]["worker"]
    assert serials[0] == {**serials[1], "worker": serials[0]["worker"]}
    worker = certificate(tmp_path, "worker")
    assert 7 <= (worker.not_valid_after_utc - worker.not_valid_before_utc).days <= 8
    assert not list(tmp_path.glob(".*")), "no half of a file is left"


@pytest.mark.parametrize(
    "host",
    ["", " ", "a b", "http://a.org", "a.org:443", "a.org/", "a..b", "*", "a.*.org", "*a.org", "-a", "a-", "1.2.3.999",
     "[::1]", "x" * 64, "a.org\n", ".".join(["x" * 60] * 5)],
)  # fmt: skip
def test_a_wrong_host_is_refused_before_any_file_changes(tmp_path: Path, capsys: Capture, host: str) -> None:
    folder = tmp_path / "certs"
    assert main(["certs", str(folder), "--host", "a.org", f"--host={host}"]) == 1
    assert "BAD_VALUE" in capsys.readouterr().err and not folder.exists()


def test_hosts_may_be_wildcards_single_labels_and_addresses(tmp_path: Path) -> None:
    hosts = ["*.example.org", "gpu_1", "a-b.example", "xn--gre-8ka.de", "7a"]
    assert main(["certs", str(tmp_path), *(f"--host={host}" for host in [*hosts, "2001:db8::1"])]) == 0
    assert set(hosts) <= set(names(tmp_path, "public", x509.DNSName))
    assert "2001:db8::1" in names(tmp_path, "public", x509.IPAddress)


def test_an_interrupted_run_leaves_no_part_of_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        assert not (tmp_path / "page_mac.key").exists()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("quire.cli.credentials.certs.secrets.token_hex", interrupt)
        assert main(["certs", str(tmp_path)]) == EXIT_INTERRUPTED
    assert main(["certs", str(tmp_path)]) == 0 and len((tmp_path / "page_mac.key").read_text()) == 65


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["{folder}", "--days", "0"], "BAD_VALUE"),
        (["{folder}", "--host", "grüße"], "BAD_VALUE"),
        (["/proc/certs"], "FOLDER_UNWRITABLE"),
        (["{foreign}"], "BAD_AUTHORITY"),
    ],
)
def test_wrong_arguments_are_told(tmp_path: Path, capsys: Capture, arguments: list[str], code: str) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for name in ("ca.pem", "ca.key"):
        (foreign / name).write_text("no PEM")
    given = [text.format(folder=tmp_path / "certs", foreign=foreign) for text in arguments]
    assert main(["certs", *given]) == 1
    assert code in capsys.readouterr().err
