"""Clients of the routers behind a Gateway."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import httpx

from quire.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.chaos.routers.envoy import Envoy

CLIENTS = 8
LIMIT_S = 120.0
HTTP_HOST, GRPC_HOST = "api.example.org", "grpc.example.org"
TOKENS = 30
# The chart's values of the routes that they use.
ROUTES = {
    "enabled": True,
    "parentRefs": [{"name": "public"}],
    "hostnames": [HTTP_HOST],
    "grpcHostnames": [GRPC_HOST],
}


class Callers:
    """Clients that ask over kept connections for answers that must not change; half of them by gRPC, if `rpc`."""

    def __init__(self, envoy: Envoy, *, rpc: bool) -> None:
        self.answers = {"http": 0, "grpc": 0}
        self.errors: list[str] = []
        self._envoy, self._rpc = envoy, rpc
        self._ending = asyncio.Event()

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        kinds = [self._ask_by_grpc if self._rpc and number % 2 else self._ask_by_http for number in range(CLIENTS)]
        tasks = [asyncio.create_task(ask(number)) for number, ask in enumerate(kinds)]
        try:
            yield
        finally:
            self._ending.set()
            await asyncio.gather(*tasks)

    def _heard(self, kind: str, text: str, wanted: str) -> str:
        """Count an answer, and return what the next one must be."""
        self.answers[kind] += 1
        if wanted and text != wanted:
            self.errors.append(f"{kind}: {text!r} instead of {wanted!r}")
        return wanted or text

    async def _ask_by_http(self, number: int) -> None:
        wanted = ""
        body = {"prompt": f"caller {number}", "max_tokens": TOKENS, "temperature": 0}
        headers = {"Host": HTTP_HOST}
        async with httpx.AsyncClient(
            trust_env=False, timeout=LIMIT_S, base_url=self._envoy.url, headers=headers
        ) as client:
            while not self._ending.is_set():
                try:
                    answer = await client.post("/v1/completions", json=body)
                    if answer.is_error:
                        self.errors.append(f"http: status {answer.status_code}: {answer.text[:300]}")
                        await asyncio.sleep(0.05)
                        continue
                    wanted = self._heard("http", answer.json()["choices"][0]["text"], wanted)
                except httpx.HTTPError as error:
                    self.errors.append(f"http: {type(error).__name__}: {error}")
                    await asyncio.sleep(0.05)

    async def _ask_by_grpc(self, number: int) -> None:
        wanted = ""
        request = inference_pb2.GenerateRequest(
            text=f"caller {number}", max_tokens=TOKENS, sampling=common_pb2.SamplingParams()
        )
        async with grpc.aio.insecure_channel(
            self._envoy.grpc, options=[("grpc.default_authority", GRPC_HOST)]
        ) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            while not self._ending.is_set():
                try:
                    text = ""
                    async for delta in stub.Generate(request, timeout=LIMIT_S):
                        text += delta.text
                    wanted = self._heard("grpc", text, wanted)
                except grpc.aio.AioRpcError as error:
                    self.errors.append(f"grpc: {error.code()}: {error.details()}")
                    await asyncio.sleep(0.05)
