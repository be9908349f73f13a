"""When certificates end is read from their files, also from those that were changed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from quire_common.errors import ConfigError
from quire_common.identity.expiry import first_expiry, record_expiry
from quire_common.identity.tls_files import TlsFiles, server_context
from quire_common.telemetry.metrics import registry
from tests.certificates import Authority


def left_s(path: str) -> float:
    end = registry.get_sample_value("quire_certificate_expiry_timestamp_seconds", {"file": path})
    assert end is not None
    return end - time.time()


def test_each_certificate_and_authority_that_is_loaded_says_when_it_ends(tmp_path: Path) -> None:
    files = Authority(tmp_path).files("worker", "worker", life_s=600)
    server_context(TlsFiles(*files))
    assert left_s(files.cert) == pytest.approx(600, abs=5)
    assert left_s(files.ca) == pytest.approx(3600, abs=5)


def test_a_renewed_certificate_replaces_what_was_told(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server_context(TlsFiles(*authority.files("worker", "worker", life_s=60)))
    files = authority.files("worker", "worker", life_s=7200)
    server_context(TlsFiles(*files))
    assert left_s(files.cert) == pytest.approx(7200, abs=5)


def test_of_several_certificates_in_a_file_the_first_end_counts(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    long, short = (Path(authority.files(name, life_s=life_s).cert) for name, life_s in (("a", 9000), ("b", 300)))
    both = tmp_path / "both.pem"
    both.write_text(long.read_text() + short.read_text())
    record_expiry(str(both), both.read_bytes())
    assert left_s(str(both)) == pytest.approx(300, abs=5)
    assert 0 < first_expiry() <= time.time() + 300


@pytest.mark.parametrize("cut", [1, 10, 40, 120, 300])
def test_a_certificate_that_is_cut_off_is_left_out(tmp_path: Path, cut: int) -> None:
    import base64

    der = base64.b64encode(bytes.fromhex("30820150") + b"\x30" * cut).decode()
    path = f"{tmp_path}/cut-{cut}.pem"
    record_expiry(path, f"-----BEGIN CERTIFICATE-----\n{der}\n-----END CERTIFICATE-----\n".encode())
    assert registry.get_sample_value("quire_certificate_expiry_timestamp_seconds", {"file": path}) is None


def test_a_certificate_that_cannot_be_loaded_tells_nothing(tmp_path: Path) -> None:
    files = Authority(tmp_path).files("worker")
    Path(files.key).write_text("no key")
    with pytest.raises(ConfigError):
        server_context(TlsFiles(files.cert, files.key))
    assert registry.get_sample_value("quire_certificate_expiry_timestamp_seconds", {"file": files.cert}) is None
