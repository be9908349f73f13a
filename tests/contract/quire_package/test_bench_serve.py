"""`quire bench serve` against a router over real sockets: one process and several, all backends, refusals."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from quire.bench.server_facts import ServerFacts, find_facts
from quire.errors import Unavailable
from tests.certificates import Authority
from tests.fakes.router.router_rig import RouterRig, router_rig

ROOT = Path(__file__).resolve().parents[3]


async def bench(rig: RouterRig, tmp_path: Path, *flags: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, what it printed, and the JSON that it saved."""
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "quire", "bench", "serve", "--base-url", f"http://{rig.router.http.address}"]
    common = ["--random-input-len", "6", "--random-output-len", "4", "--result-filename", str(result), *flags]
    process = await asyncio.create_subprocess_exec(
        *command, *common, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode or 0, out.decode(), json.loads(result.read_text()) if result.exists() else {}


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--num-processes", "3", "--max-concurrency", "4", "--random-range-ratio", "0.5"),
        ("--request-rate", "200", "--backend", "openai-chat", "--save-detailed"),
        ("--extra-body", '{"return_token_ids": true}', "--random-output-len", "12", "--max-concurrency", "1"),
    ],
)
async def test_bench_counts_equal_what_was_served(tmp_path: Path, flags: tuple[str, ...]) -> None:
    async with router_rig() as rig:
        code, out, result = await bench(rig, tmp_path, "--num-prompts", "20", "--ignore-eos", *flags)
        assert code == 0, out
        assert len(rig.scheduler.submits) == 21  # one of them to see whether it works
        measured = rig.scheduler.submits[1:]
        assert result["completed"] == 20 and result["failed"] == 0
        assert result["total_output_tokens"] == sum(s.sequence.stop.max_tokens for s in measured)
        assert result["total_input_tokens"] == sum(len(s.sequence.inputs[0].token_ids) // 4 for s in measured)
        assert all(s.sequence.stop.ignore_eos for s in measured)
        assert len({s.context.request_id for s in measured}) == 20
        assert 0 < result["mean_ttft_ms"] <= result["p99_ttft_ms"] and result["mean_itl_ms"] > 0
        if "--max-concurrency" in flags:
            assert result["max_concurrent_requests"] <= int(flags[flags.index("--max-concurrency") + 1])
        if "--extra-body" in flags:
            assert result["decode_window_concurrency"] == 1
            assert 0 < result["median_decode_tpot_ms"] <= result["p99_decode_tpot_ms"] < 1000
        assert "Successful requests:                     20" in out


class Models(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "tiny", "vocab_size": 7}]}')


def test_insecure_is_also_for_the_question_which_model_is_served(tmp_path: Path) -> None:
    own = Authority(tmp_path).files("router")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own.cert, own.key)
    with HTTPServer(("127.0.0.1", 0), Models) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"https://127.0.0.1:{server.server_port}"
        with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
            find_facts(url, {}, 0)
        assert find_facts(url, {}, 0, insecure=True) == ServerFacts("tiny", 7)
        server.shutdown()


def test_server_that_does_not_speak_http_is_named_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(bytes.fromhex("000012040000000000") + bytes(18))  # a gRPC server's first words

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(Unavailable, match="NOT_HTTP"):
            find_facts(f"http://127.0.0.1:{server.getsockname()[1]}", {}, 60)


async def test_failures_are_counted_and_shown(tmp_path: Path) -> None:
    async with router_rig(requests_per_minute=8) as rig:
        plot = tmp_path / "chart.svg"
        code, out, result = await bench(rig, tmp_path, "--num-prompts", "12", "--plot", str(plot))
        assert code == 0 and (result["completed"], result["failed"]) == (7, 5), out
        assert "5 failed: HTTP 429" in out and plot.read_text().startswith("<svg")


async def test_bench_fails_where_the_server_refuses(tmp_path: Path) -> None:
    async with router_rig(api_key=("k",)) as rig:
        code, out, _ = await bench(rig, tmp_path)
        assert code == 1 and "wants an API key" in out
        code, out, result = await bench(rig, tmp_path, "--api-key", "k", "--num-prompts", "3", "--num-warmups", "2")
        assert code == 0 and result["completed"] == 3 and len(rig.scheduler.submits) == 6
        code, out, _ = await bench(rig, tmp_path, "--api-key", "k", "--model", "nope", "--random-vocab-size", "9")
        assert code == 1 and "FIRST_REQUEST_FAILED" in out
