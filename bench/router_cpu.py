"""Router CPU per streamed token: a real router process between a fake scheduler, a fake tokenizer and raw clients.

Prints JSON. `python -m bench.router_cpu --streams 64 --tokens 400 --step-ms 10`. CPU time is the router process's alone
(user + system), so the figure holds on a loaded machine; `events_per_token` below 1 says that deltas were joined
because somebody could not keep up, and the figure then flatters.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
import httpx
import uvloop

from quire.v1 import inference_pb2, inference_pb2_grpc

ROOT = Path(__file__).resolve().parents[1]
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--route", default="completions", choices=("completions", "chat", "grpc"))
    print(json.dumps(uvloop.run(measure(parser.parse_args()))))
    return 0


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    scheduler = start("tests.fakes.fake_scheduler", "--step-ms", str(options.step_ms))
    tokenizer = start("tests.fakes.fake_tokenizer")
    processes = [scheduler, tokenizer]
    try:
        router, url, grpc_address = start_router(address(scheduler), address(tokenizer))
        processes.append(router)
        await until_ready(url)
        target = grpc_address if options.route == "grpc" else url
        await run_streams(target, options, tokens=20)  # connections, caches, first imports
        cpu_before, wall_before = cpu_s(router.pid), time.perf_counter()
        events = await run_streams(target, options, tokens=options.tokens)
        cpu, wall = cpu_s(router.pid) - cpu_before, time.perf_counter() - wall_before
        tokens = options.streams * options.tokens
        return {
            "streams": options.streams,
            "tokens": tokens,
            "step_ms": options.step_ms,
            "route": options.route,
            "router_cpu_us_per_token": round(cpu / tokens * 1e6, 1),
            "router_cpu_share": round(cpu / wall, 3),
            "events_per_token": round(events / tokens, 3),
            "tokens_per_s": round(tokens / wall),
            "wall_s": round(wall, 2),
        }
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(20)


def start(module: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", module, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def address(process: subprocess.Popen[str]) -> str:
    if process.stdout is None:
        raise RuntimeError("started without a pipe")
    return process.stdout.readline().strip()


def start_router(scheduler: str, tokenizer: str) -> tuple[subprocess.Popen[str], str, str]:
    command = [sys.executable, "-m", "quire_router", "--port=0", f"--schedulers={scheduler}"]
    # Its log goes to a file, since a pipe that nobody reads would stop it.
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, f"--tokenizers={tokenizer}", "--log-format=json"], cwd=ROOT, stderr=log, text=True
        )
        while process.poll() is None:
            listening = ""
            for line in Path(log.name).read_text().split("\n")[:-1]:
                record = json.loads(line)
                listening = record.get("address", listening)
                if "url" in record:
                    print(f"router: pid {process.pid}, {record['url']}", file=sys.stderr)  # for a profiler
                    return process, record["url"], listening
            time.sleep(0.05)
    raise RuntimeError("the router did not start")


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def until_ready(url: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        while (await client.get(f"{url}/health")).status_code != 200:
            await asyncio.sleep(0.05)


async def run_streams(url: str, options: argparse.Namespace, *, tokens: int) -> int:
    if options.route == "grpc":
        async with grpc.aio.insecure_channel(url) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            return sum(await asyncio.gather(*(grpc_stream(stub, tokens) for _ in range(options.streams))))
    host, port = url.removeprefix("http://").split(":")
    return sum(await asyncio.gather(*(stream(host, int(port), options.route, tokens) for _ in range(options.streams))))


async def grpc_stream(stub: inference_pb2_grpc.InferenceStub, tokens: int) -> int:
    request = inference_pb2.GenerateRequest(text="hello there", max_tokens=tokens, ignore_eos=True)
    events = 0
    async for _ in stub.Generate(request):
        events += 1
    return events


async def stream(host: str, port: int, route: str, tokens: int) -> int:
    """One raw client: counts events, parses nothing."""
    fields: dict[str, Any] = {"stream": True, "max_tokens": tokens, "ignore_eos": True}
    if route == "chat":
        path, fields["messages"] = "/v1/chat/completions", [{"role": "user", "content": "hello there"}]
    else:
        path, fields["prompt"] = "/v1/completions", "hello there"
    body = json.dumps(fields).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(head.encode() + body)
    events, tail = 0, b""
    while b"[DONE]" not in tail:
        chunk = await reader.read(65536)
        if not chunk:
            raise RuntimeError("the stream broke")
        events += chunk.count(b"data: {")
        tail = (tail + chunk)[-64:]
    writer.close()
    return events


if __name__ == "__main__":
    sys.exit(main())
