"""Runs a set of requests through the five services: concurrent gRPC streams to a local stack, with each service's CPU
time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import grpc
import numpy as np

from bench.harness.process_cpu import tree_cpu_s
from bench.harness.workload import Request
from quire.local.stack import LocalStack
from quire.v1 import common_pb2, inference_pb2, inference_pb2_grpc

# What separate services cost beside the worker, which any engine has.
FRONT = ("router", "tokenizer", "scheduler")


def run(
    stack: LocalStack, requests: list[Request], streams: int, secure: grpc.ChannelCredentials | None = None
) -> dict[str, object]:
    """Serve all requests with at most `streams` open at once; with credentials, over TLS. Checks that every answer has
    its full length."""
    before = cpu_seconds(stack)
    seconds, ttft, gaps = asyncio.run(serve_requests(stack.grpc, requests, streams, secure))
    tokens = sum(r.output_len for r in requests)
    cpu = cpu_us_per_token(before, cpu_seconds(stack), tokens)
    return {
        "output_tokens": tokens,
        "seconds": seconds,
        "output_tokens_per_s": tokens / seconds,
        "ttft_p50_ms": float(np.percentile(ttft, 50)) * 1e3,
        "gap_p50_ms": float(np.percentile(gaps, 50)) * 1e3,
        "gap_p99_ms": float(np.percentile(gaps, 99)) * 1e3,
        "cpu_ms_per_1k_tokens": {name: round(ms, 2) for name, ms in cpu.items()},
        "front_cpu_ms_per_1k_tokens": round(sum(cpu[name] for name in FRONT), 2),
    }


def warm_up(stack: LocalStack, requests: list[Request]) -> None:
    """Run a first request, so that lazy initialization is done."""
    asyncio.run(serve_requests(stack.grpc, requests, len(requests)))


async def serve_requests(
    address: str, requests: list[Request], streams: int, secure: grpc.ChannelCredentials | None = None
) -> tuple[float, list[float], list[float]]:
    """Serve the requests with at most `streams` open at once. Returns three times in seconds: of all requests together,
    until each first message, and between two messages of a stream."""
    ttft: list[float] = []
    gaps: list[float] = []
    gate = asyncio.Semaphore(streams)
    async with grpc.aio.secure_channel(address, secure) if secure else grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def one(request: Request) -> None:
            async with gate:
                message = inference_pb2.GenerateRequest(
                    token_ids=inference_pb2.TokenIds(ids=np.array(request.prompt_ids, "<i4").tobytes()),
                    max_tokens=request.output_len,
                    ignore_eos=True,
                    sampling=common_pb2.SamplingParams(temperature=0),
                )
                last, seen, usage = time.perf_counter(), False, 0
                async for response in stub.Generate(message):
                    before, last = last, time.perf_counter()
                    (gaps if seen else ttft).append(last - before)
                    seen = True
                    if response.HasField("usage"):
                        usage = response.usage.completion_tokens
                if usage != request.output_len:
                    raise RuntimeError(f"asked for {request.output_len} tokens, got {usage}")

        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for request in requests:
                group.create_task(one(request))
        return time.perf_counter() - began, ttft, gaps


def cpu_seconds(stack: LocalStack) -> dict[str, float]:
    """Return user and system time of each service so far, with its children, because a worker has a transfer agent."""
    state = stack.directory.read()
    if state is None:
        raise RuntimeError("the stack has left no state")
    return {name: tree_cpu_s(service.pid) for name, service in state.services.items()}


def cpu_us_per_token(before: Mapping[str, float], after: Mapping[str, float], tokens: int) -> dict[str, float]:
    """Return the CPU time of each service between two results of `cpu_seconds`. The number is also the milliseconds for
    a thousand tokens."""
    return {name: (after[name] - before[name]) * 1e6 / tokens for name in after}
