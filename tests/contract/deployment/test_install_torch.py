"""The driver's tool and the index, which decide where torch is installed from, are asked as they are."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.install_torch import answers, has_nvidia_gpu


@pytest.mark.parametrize(("says", "found"), [("GPU 0: NVIDIA H200", True), ("No devices were found", False)])
def test_the_drivers_tool_is_believed_if_it_lists_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, found: bool
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{says}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert has_nvidia_gpu(tmp_path / "empty") is found


class _Index(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/good/torch/" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.fixture
def index() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Index)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_probe_asks_for_torch(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert answers(f"{index}/good")
    assert not answers(f"{index}/bad")
    assert not answers("http://127.0.0.1:1", timeout_s=2.0)
