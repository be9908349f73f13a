"""Values that follow their files: what is read again, when, and what is kept."""

from __future__ import annotations

import os
import time
import weakref
from pathlib import Path

import pytest

from quire_common.errors import ConfigError
from quire_common.identity import watched_files
from quire_common.identity.tls_files import TlsFiles, read_tls_files
from quire_common.identity.watched_files import WatchedFiles
from quire_common.telemetry import metrics
from tests.certificates import Authority, replace

OLD_NS = 10**9


def watched(what: str, *paths: Path) -> WatchedFiles[str]:
    def load() -> str:
        text = "".join(path.read_text() for path in paths)
        if "bad" in text:
            raise ConfigError("BAD", "It is bad.", "Mend it.")
        return text

    return WatchedFiles(what, [str(path) for path in paths], load)


def aged(path: Path, text: str) -> None:
    """Write a file as if it had been there for long."""
    replace(path, text.encode())
    os.utime(path, ns=(time.time_ns() - 100 * OLD_NS, time.time_ns() - 100 * OLD_NS))


def outcomes(what: str) -> dict[str, float]:
    lines = metrics.render().decode().splitlines()
    counts = [line for line in lines if line.startswith("quire_reloads_total{") and f'what="{what}"' in line]
    found = {line.split('outcome="')[1].split('"')[0]: float(line.split()[-1]) for line in counts}
    assert found.keys() == {"loaded", "refused"}, "both are there from the start, or their first would be no increase"
    return {outcome: count for outcome, count in found.items() if count}


def test_a_changed_file_is_loaded_and_an_unchanged_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a"
    aged(path, "one")
    files = watched("changed", path)
    files.check()
    assert (files.value, files.generation, outcomes("changed")) == ("one", 0, {})
    aged(path, "two")
    files.check()
    files.check()
    assert (files.value, files.generation, outcomes("changed")) == ("two", 1, {"loaded": 1.0})


def test_the_thread_keeps_no_value_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_files, "POLL_S", 0.001)
    watcher = watched_files._Watcher()
    monkeypatch.setattr(watched_files, "_watcher", watcher)
    path = tmp_path / "a"
    aged(path, "one")
    files = watched("released", path)
    left = weakref.ref(files)
    aged(path, "two")
    deadline = time.monotonic() + 5
    while files.value == "one":
        assert time.monotonic() < deadline
        time.sleep(0.001)
    del files
    while left() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_bad_file_keeps_the_old_value_and_is_counted_once(tmp_path: Path) -> None:
    path = tmp_path / "a"
    aged(path, "one")
    files = watched("refused", path)
    for content in ("bad", "bad again"):
        aged(path, content)
        files.check()
        files.check()
    path.unlink()
    files.check()
    assert (files.value, files.generation, outcomes("refused")) == ("one", 0, {"refused": 3.0})
    aged(path, "three")
    files.check()
    assert (files.value, outcomes("refused")) == ("three", {"refused": 3.0, "loaded": 1.0})


def test_half_of_a_pair_is_no_error_while_the_other_half_may_still_come(tmp_path: Path) -> None:
    path = tmp_path / "a"
    aged(path, "one")
    files = watched("half", path)
    replace(path, b"bad")  # written this moment
    files.check()
    assert (files.value, outcomes("half")) == ("one", {})
    replace(path, b"two")
    files.check()
    assert (files.value, outcomes("half")) == ("two", {"loaded": 1.0})


def test_the_thread_passes_changes_on_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_files, "POLL_S", 0.02)
    monkeypatch.setattr(watched_files, "_watcher", watched_files._Watcher())  # that of other tests sleeps for a second
    path, heard = tmp_path / "a", list[str]()
    aged(path, "one")
    files = WatchedFiles("thread", [str(path)], path.read_text, heard.append)
    aged(path, "two")
    deadline = time.monotonic() + 60
    while files.value != "two" or not heard:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert heard == ["two"]


def test_files_of_tls_must_fit_together(tmp_path: Path) -> None:
    one, two = (Authority(tmp_path, name).files(f"{name}-server") for name in ("first", "second"))
    assert read_tls_files(TlsFiles(*one)).ca == Path(one.ca).read_bytes()
    (tmp_path / "text.pem").write_text("no certificate")
    for files in (
        TlsFiles(one.cert, two.key),
        TlsFiles(one.cert),
        TlsFiles(key=one.key),
        TlsFiles(one.cert, str(tmp_path / "none.key")),
        TlsFiles(*one[:2], ca=str(tmp_path / "text.pem")),
        TlsFiles(str(tmp_path / "text.pem"), one.key),
    ):
        with pytest.raises(ConfigError) as caught:
            read_tls_files(files)
        assert caught.value.code == "TLS_FILE" and caught.value.fix, files
