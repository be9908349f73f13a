"""Measures the router's CPU time per streamed token: a real router process with a fake scheduler, a fake tokenizer and
raw clients.

`python -m bench.router.cpu --streams 64 --tokens 400 --step-ms 10` prints JSON. CPU time (user + system) is of the
router process alone, so the figure is valid on a loaded machine. If `events_per_token` is below 1, deltas were joined
because a process could not keep up, and the figure is too good.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
from typing import Any

import grpc
import uvloop

from bench import ROOT
from bench.harness.processes import Service, until_healthy
from bench.router.stream_clients import request_of
from quire.v1 import inference_pb2, inference_pb2_grpc

ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--route", default="completions", choices=(*ROUTES, "grpc"))
    parser.add_argument("--token-ids", action="store_true", help="over HTTP: events tell their tokens' ids")
    options = parser.parse_args()
    if options.token_ids and options.route not in ROUTES:
        parser.error("--token-ids is for routes over HTTP")
    print(json.dumps(uvloop.run(measure(options))))
    return 0


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    scheduler = start("tests.fakes.scheduler.fake_scheduler", "--step-ms", str(options.step_ms))
    tokenizer = start("tests.fakes.fake_tokenizer")
    with contextlib.ExitStack() as stack:
        for fake in (scheduler, tokenizer):
            stack.callback(fake.wait, 20)
            stack.callback(fake.terminate)
        peers = f"--schedulers={address(scheduler)}", f"--tokenizers={address(tokenizer)}"
        router = stack.enter_context(Service("router", "--port=0", *peers))
        url = str(router.until(lambda line: "url" in line)["url"])
        print(f"router: pid {router.pid}, {url}", file=sys.stderr)  # for a profiler
        await asyncio.to_thread(until_healthy, url)
        target = router.address() if options.route == "grpc" else url
        await run_streams(target, options, tokens=20)  # connections, caches, first imports
        cpu_before, wall_before = router.cpu_s(), time.perf_counter()
        events = await run_streams(target, options, tokens=options.tokens)
        cpu, wall = router.cpu_s() - cpu_before, time.perf_counter() - wall_before
        tokens = options.streams * options.tokens
        return {
            "streams": options.streams,
            "tokens": tokens,
            "step_ms": options.step_ms,
            "route": options.route,
            "token_ids": options.token_ids,
            "router_cpu_us_per_token": round(cpu / tokens * 1e6, 1),
            "router_cpu_share": round(cpu / wall, 3),
            "events_per_token": round(events / tokens, 3),
            "tokens_per_s": round(tokens / wall),
            "wall_s": round(wall, 2),
        }


def start(module: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", module, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def address(process: subprocess.Popen[str]) -> str:
    if process.stdout is None:
        raise RuntimeError("started without a pipe")
    return process.stdout.readline().strip()


async def run_streams(url: str, options: argparse.Namespace, *, tokens: int) -> int:
    if options.route == "grpc":
        async with grpc.aio.insecure_channel(url) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            return sum(await asyncio.gather(*(grpc_stream(stub, tokens) for _ in range(options.streams))))
    host, port = url.removeprefix("http://").split(":")
    names = (f"s-{tokens}-{index}" for index in range(options.streams))
    more = {"return_token_ids": True} if options.token_ids else {}
    requests = [request_of(ROUTES[options.route], name, tokens, **more) for name in names]
    return sum(await asyncio.gather(*(stream(host, int(port), request) for request in requests)))


async def grpc_stream(stub: inference_pb2_grpc.InferenceStub, tokens: int) -> int:
    request = inference_pb2.GenerateRequest(text="hello there", max_tokens=tokens, ignore_eos=True)
    events = 0
    async for _ in stub.Generate(request):
        events += 1
    return events


async def stream(host: str, port: int, request: bytes) -> int:
    """Run one raw client, which counts events and parses nothing."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(request)
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
