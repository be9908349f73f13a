"""What an abusive client sends: one case after the other, from a process of its own.

`python -m tests.abuse.attacks CASE HTTP GRPC KEY SECONDS` prints what it was answered, as JSON: requests, and refusals
by status and code.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import httpx

from quire.v1 import inference_pb2
from quire_router.front.parameters import tables
from tests.abuse import bounds, raw_rpc, rpc_bounds

_LIMIT_S = 60.0
_CONNECTIONS = 256
_SMALL_WINDOWS = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16384)]


@dataclass
class Target:
    """Where the attack goes, for how long, and what came of it."""

    http: str
    grpc: str
    key: str
    seconds: float
    requests: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    until: float = 0.0

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """The time runs from now on: what is sent has been made."""
        self.until = time.monotonic() + self.seconds

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.until

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.key}"),)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.http.removeprefix("http://").split(":")
        return host, int(port)

    def refused(self, cause: str) -> None:
        self.refusals[cause] += 1


async def _post(target: Target, client: httpx.AsyncClient, path: str, body: Any, **options: Any) -> None:
    """Post a body as JSON; bytes are posted as they are."""
    target.requests += 1
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        async with asyncio.timeout(max(target.until - time.monotonic(), 1.0)):
            answer = await client.post(path, content=content, **options)
    except TimeoutError:
        target.refused("unanswered")
    except httpx.HTTPError as error:
        target.refused(type(error).__name__)
    else:
        if answer.status_code != 200:
            target.refused(f"{answer.status_code} {_code(answer)}")


def _code(answer: httpx.Response) -> str:
    try:
        error = answer.json()["error"]
        return str(error.get("code") or error.get("type"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


async def _call(target: Target, call: Any) -> None:
    """One gRPC call to its end, whatever kind it is."""
    target.requests += 1
    try:
        async with asyncio.timeout(max(target.until - time.monotonic(), 1.0)):
            if hasattr(call, "__aiter__"):
                async for message in call:
                    if _has_error(message):
                        target.refused(f"in stream {message.error.code}")
            else:
                await call
    except TimeoutError:
        target.refused("unanswered")
    except grpc.aio.AioRpcError as error:
        target.refused(error.code().name)
    finally:
        call.cancel()


def _has_error(message: Any) -> bool:
    return isinstance(message, inference_pb2.GenerateResponse) and message.HasField("error")


async def _together(works: Iterable[Callable[[], Awaitable[None]]], at_once: int, target: Target) -> None:
    """So many at a time, until all were done or the time is over."""
    waiting = iter(works)
    target.begin()

    async def one() -> None:
        for work in waiting:
            if target.over:
                return
            await work()

    await asyncio.gather(*(one() for _ in range(at_once)))


@contextlib.asynccontextmanager
async def _http(target: Target, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=_CONNECTIONS)
    async with httpx.AsyncClient(base_url=target.http, headers=headers, limits=limits, timeout=_LIMIT_S) as client:
        yield client


async def http_each_field(target: Target) -> None:
    """Every field of every route, one at a time, at its bound."""
    rng = random.Random(1)
    async with _http(target, **target.headers) as client:
        works = [partial(_post, target, client, route, body) for route, _, body in bounds.each_field(rng)]
        rng.shuffle(works)
        await _together(works, 8, target)


async def http_all_fields(target: Target) -> None:
    """All fields of a route at once at their bounds."""
    rng = random.Random(2)
    bodies = [
        (route, json.dumps(bounds.all_fields(table, base, rng, siblings)).encode())
        for siblings in (16, 16, 128)
        for route, (table, base) in bounds.ROUTES.items()
    ]
    async with _http(target, **target.headers) as client:
        await _together(
            (partial(_post, target, client, route, body) for _ in range(10_000) for route, body in bodies), 16, target
        )


async def http_products(target: Target) -> None:
    """Fields that every sequence repeats, times n: within each field's bound."""
    rng = random.Random(3)
    stops, words, repetition = (
        bounds.at_bound(name, tables.SAMPLING[name], rng) for name in ("stop", "bad_words", "repetition_detection")
    )
    bodies: list[dict[str, Any]] = [
        {"n": 128, "stop": stops},
        {"n": 29, "stop": stops},
        {"n": 128, "bad_words": words},
        {"n": 128, "allowed_token_ids": bounds.TOKENS * 2},
        {"n": 128, "logit_bias": {str(token): 1.0 for token in range(1000)}},
        {"n": 128, "logprobs": 20},
        {"n": 128, "use_beam_search": True},
        {"n": 40, "use_beam_search": True, "logprobs": 20, "prompt": bounds.LONG_TEXT[:3000]},
        {"n": 16, "prompt": [bounds.LONG_TEXT[:4000]] * 16},
        {"n": 128, "repetition_detection": repetition},
        {"prompt": bounds.LONG_TEXT[:3000], "prompt_logprobs": 20, "n": 8},
    ]  # fmt: skip
    async with _http(target, **target.headers) as client:
        for_ever = (body for _ in range(10_000) for body in bodies)
        filled = ({"prompt": "ABUSE:", "max_tokens": 32, "ignore_eos": True, **body} for body in for_ever)
        await _together((partial(_post, target, client, "/v1/completions", body) for body in filled), 4, target)


async def http_long_bodies(target: Target) -> None:
    """Bodies of 4 MiB that take long to parse: numbers, messages, empty lists, NaN, and JSON that breaks off."""
    numbers = ",".join(["300"] * 1_000_000)
    messages = [{"role": "user", "content": [{"type": "text", "text": "x" * 300}]}] * tables.MAX_MESSAGES
    bodies = [
        ("/v1/completions", f'{{"prompt": [{numbers}], "max_tokens": 1}}'),
        ("/detokenize", f'{{"tokens": [{numbers}]}}'),
        ("/v1/completions", f'{{"prompt": "a", "user": [NaN, {numbers}]}}'),
        ("/v1/completions", f'{{"prompt": "a", "user": [{numbers}]'),
        ("/v1/completions", f'{{"prompt": "a", "user": [{",".join(["[]"] * 120_000)}]}}'),
        ("/v1/chat/completions", json.dumps({"messages": messages})),
        ("/v1/responses", json.dumps({"input": messages})),
        ("/v1/messages/count_tokens", json.dumps({"messages": messages})),
    ]
    async with _http(target, **target.headers) as client:
        works = (partial(_post, target, client, route, body.encode()) for _ in range(10_000) for route, body in bodies)
        await _together(works, 16, target)


async def http_keyless(target: Target) -> None:
    """Bodies of 4 MiB without a key, with wrong keys, and to routes that are not there."""
    body = json.dumps({"prompt": "x" * (4 * 1024 * 1024 - 100)}).encode()
    paths = [*bounds.ROUTES, "/v1/no-such-route", "/metrics"]
    async with _http(target) as client:
        works = (
            partial(_post, target, client, path, body, headers={"Authorization": key} if key else {})
            for number in range(10_000)
            for path in paths
            for key in ("", f"Bearer wrong-{number}")
        )
        await _together(works, 32, target)


async def http_slow_writers(target: Target) -> None:
    """Two hundred connections that send a head, or a body, a byte at a time."""
    content = json.dumps({"prompt": "x" * 50_000}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {target.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    ).encode()

    async def one(number: int) -> None:
        target.requests += 1
        try:
            _, writer = await asyncio.open_connection(*target.address)
            try:
                at_once, rest = (head + content[:100], content[100:]) if number % 2 else (head[:20], head[20:])
                writer.write(at_once)
                for position in range(len(rest)):
                    if target.over:
                        return
                    writer.write(rest[position : position + 1])
                    await writer.drain()
                    await asyncio.sleep(0.1)
            finally:
                writer.close()
        except OSError as error:
            target.refused(type(error).__name__)

    await asyncio.gather(*(one(number) for number in range(200)))


async def http_large_slow_bodies(target: Target) -> None:
    """A hundred bodies of almost four mebibytes whose last byte never comes."""
    content = b" " * (4 * 1024 * 1024 - 1)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {target.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content) + 1}\r\n\r\n"
    ).encode()

    async def one() -> None:
        target.requests += 1
        try:
            reader, writer = await asyncio.open_connection(*target.address)
            try:
                writer.write(head)
                for at in range(0, len(content), 65_536):
                    writer.write(content[at : at + 65_536])
                    await writer.drain()
                    await asyncio.sleep(0.05)  # else it is the network that is full
                async with asyncio.timeout(max(0.1, target.until - time.monotonic())):
                    line = await reader.readline()
                target.refused(line.decode(errors="replace").split(" ")[1] if b" " in line else "closed")
            finally:
                writer.close()
        except TimeoutError:
            target.refused("unanswered")
        except OSError as error:
            target.refused(type(error).__name__)

    await asyncio.gather(*(one() for _ in range(100)))


async def http_slow_readers(target: Target) -> None:
    """Long answers with logprobs, whose readers take four kilobytes and stop."""
    body = {"prompt": "SLOW:", "n": 8, "max_tokens": 200, "ignore_eos": True, "stream": True, "logprobs": 20}
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {target.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    ).encode()

    async def one() -> None:
        target.requests += 1
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(raw, target.address)
            reader, writer = await asyncio.open_connection(sock=raw, limit=4096)
            writer.write(head + content)
            line = await reader.readline()
            if b" 200 " not in line:
                target.refused(line.decode(errors="replace").split(" ")[1] if b" " in line else "closed")
            await asyncio.sleep(max(0.0, target.until - time.monotonic()))
            writer.close()
        except OSError as error:
            target.refused(type(error).__name__)

    await asyncio.gather(*(one() for _ in range(24)))


async def grpc_each_field(target: Target) -> None:
    """Every field of Generate, one at a time, at its bound, and the other RPCs of the port."""
    async with grpc.aio.insecure_channel(target.grpc) as channel:
        works = [lambda c=c: _call(target, c(channel, target.metadata)) for c in rpc_bounds.each_field()]
        random.Random(4).shuffle(works)
        await _together(works, 8, target)


async def grpc_all_fields(target: Target) -> None:
    """All of them at once."""
    async with grpc.aio.insecure_channel(target.grpc) as channel:
        calls = [rpc_bounds.all_fields(siblings) for siblings in (16, 16, 16, 128)]
        works = (lambda c=c: _call(target, c(channel, target.metadata)) for _ in range(10_000) for c in calls)
        await _together(works, 16, target)


async def grpc_keyless(target: Target) -> None:
    """Messages without a key, over eight connections: half as they are, half made small by gzip."""
    big = rpc_bounds.compressible(60 << 20)
    small = rpc_bounds.compressible(3 << 20)
    async with contextlib.AsyncExitStack() as opened:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        channels = [
            await opened.enter_async_context(grpc.aio.insecure_channel(target.grpc, options, compression=compression))
            for compression in (grpc.Compression.Gzip, grpc.Compression.NoCompression) * 4
        ]
        works = (
            lambda c=channels[number % 8], m=big if number % 9 == 0 else small, rpc=number: _call(
                target, rpc_bounds.raw_call(c, m, rpc)
            )
            for number in range(100_000)
        )
        await _together(works, 16, target)


async def grpc_slow_writers(target: Target) -> None:
    """Two hundred connections that send their opening, or a message, a byte at a time."""
    content = raw_rpc.message("x" * 50_000, 4)
    async with raw_rpc.RawCall(target.grpc, target.key) as call:  # at once it is answered: the frames are right
        await call.send(call.opening + raw_rpc.data_frame(raw_rpc.message("ABUSE:", 4), last=True))
        async with asyncio.timeout(_LIMIT_S):
            while raw_rpc.DATA not in call.heard:
                if call.closed or raw_rpc.RESET in call.heard or raw_rpc.GOAWAY in call.heard:
                    raise RuntimeError("a call that is written at once is not answered")
                call.changed.clear()
                await call.changed.wait()
    target.begin()

    async def one(number: int) -> None:
        target.requests += 1
        try:
            async with raw_rpc.RawCall(target.grpc, target.key, acknowledges=number % 2 == 1) as call:
                at_once = call.opening if number % 2 else call.opening[:10]
                rest = content if number % 2 else call.opening[10:]
                await call.send(at_once)
                for byte in rest:
                    if target.over or call.closed or call.heard:
                        break
                    part = bytes((byte,))
                    await call.send(raw_rpc.data_frame(part) if number % 2 else part)
                    await asyncio.sleep(0.1)
                if call.closed or call.heard:
                    target.refused("closed" if call.closed else "ended")
        except OSError as error:
            target.refused(type(error).__name__)

    await asyncio.gather(*(one(number) for number in range(200)))


async def grpc_slow_readers(target: Target) -> None:
    """Streams that take a first message and no other."""

    async def one() -> None:
        target.requests += 1
        async with grpc.aio.insecure_channel(target.grpc, _SMALL_WINDOWS) as channel:
            call = rpc_bounds.long_answer()(channel, target.metadata)
            try:
                async with asyncio.timeout(max(target.until - time.monotonic(), 0.1)):
                    await call.read()
                await asyncio.sleep(max(0.0, target.until - time.monotonic()))
            except TimeoutError:
                target.refused("unanswered")
            except grpc.aio.AioRpcError as error:
                target.refused(error.code().name)
            finally:
                call.cancel()

    await asyncio.gather(*(one() for _ in range(24)))


CASES: dict[str, Callable[[Target], Coroutine[Any, Any, None]]] = {
    "HTTP: each field": http_each_field,
    "HTTP: all fields": http_all_fields,
    "HTTP: products": http_products,
    "HTTP: long bodies": http_long_bodies,
    "HTTP: no key": http_keyless,
    "HTTP: slow writers": http_slow_writers,
    "HTTP: large slow bodies": http_large_slow_bodies,
    "HTTP: slow readers": http_slow_readers,
    "gRPC: each field": grpc_each_field,
    "gRPC: all fields": grpc_all_fields,
    "gRPC: no key": grpc_keyless,
    "gRPC: slow writers": grpc_slow_writers,
    "gRPC: slow readers": grpc_slow_readers,
}


def main() -> None:
    """Runs one case."""
    case, http, address, key, seconds = sys.argv[1:6]
    target = Target(http, address, key, float(seconds))
    asyncio.run(CASES[case](target))
    print(json.dumps({"requests": target.requests, "refusals": target.refusals.most_common(6)}))


if __name__ == "__main__":
    main()
