"""Event streams have the same bytes with and without tasks, whatever the connection does."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from quire.v1 import scheduler_pb2 as pb
from quire_common.errors import Internal
from quire_router.front.http import stream_writer
from quire_router.sequences.sequence_state import SequenceState
from tests.fakes.router.router_faults import inside, until
from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler, Life

TEXT = "aé😀日本語 and so on "


class InStep(FakeScheduler):
    """Says no step before the client was told of the last one: on a busy machine several would be told as one."""

    rig: RouterRig | None = None

    async def _next(self, life: Life) -> pb.SessionResponse:
        await until(lambda: self.rig is None or all(map(self._is_told, inside(self.rig))))
        return await super()._next(life)

    def _is_told(self, sequence: SequenceState) -> bool:
        run = self.running.get(sequence.handle)
        heard = run is None or sequence.engine.tokens == run.sent
        return heard and sequence.all_answered and not sequence.queued


def request(rig: RouterRig, path: str = "/v1/completions", version: str = "1.1", **fields: Any) -> bytes:
    body = json.dumps({"prompt": TEXT, "max_tokens": 40, "stream": True, "request_id": "r", **fields}).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def connect(rig: RouterRig) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = rig.router.http.address.split(":")
    return await asyncio.open_connection(host, int(port))


async def read_answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of one chunked answer, the chunks taken apart."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    body = b""
    while size := int(await asyncio.wait_for(reader.readuntil(b"\r\n"), 60), 16):
        body += await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readexactly(2) == b"\r\n"
    return head, body


def told(body: bytes) -> bytes:
    return re.sub(rb'"created":\d+', b'"created":0', body)


def texts(body: bytes) -> str:
    *frames, done, nothing = body.split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b"")
    chunks = [json.loads(frame.removeprefix(b"data: ")) for frame in frames]
    return "".join(sequence["text"] for chunk in chunks for sequence in chunk["choices"])


@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 3, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}, {"stop": "d so"}],
    ids=["plain", "usage", "stop"],
)
async def test_streams_with_and_without_tasks_write_the_same_bytes(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = InStep(step_s=0)
    async with router_rig([scheduler]) as rig:
        scheduler.rig, bodies = rig, []
        for _ in range(2):
            reader, writer = await connect(rig)
            writer.write(request(rig, **fields))
            bodies.append(told((await read_answer(reader))[1]))
            writer.close()
            monkeypatch.setattr(stream_writer, "chunk_writer", lambda scope: None)
        assert bodies[0] == bodies[1]
        assert bodies[0].count(b"data: ") > 10


@pytest.mark.parametrize("tasks", [False, True])
async def test_slow_stream_sends_ping_comments(tasks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if tasks:
        monkeypatch.setattr(stream_writer, "chunk_writer", lambda scope: None)
    scheduler = FakeScheduler(step_s=0.5)
    scheduler.awake.clear()
    async with router_rig([scheduler], stream_ping_s=0.05, replica_timeout_s=60.0) as rig:
        reader, writer = await connect(rig)
        writer.write(request(rig, prompt="ab", max_tokens=3))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert b": ping\n\n" in await reader.readuntil(b"ping\n\n\r\n")
        scheduler.awake.set()
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += await reader.readexactly(size + 2)
        writer.close()
    frames = [frame.strip() for frame in body.split(b"\n\n")]
    events = [place for place, frame in enumerate(frames) if frame.startswith(b"data: {")]
    assert any(frame == b": ping" for frame in frames[events[0] : events[-1]])
    assert texts(b"\n\n".join([*(frame for frame in frames if frame.startswith(b"data:")), b""])) == "aba"


async def test_error_after_a_ping_comment_is_an_event() -> None:
    scheduler = FakeScheduler()
    scheduler.awake.clear()
    async with router_rig([scheduler], stream_ping_s=0.05, replica_timeout_s=60.0) as rig:
        reader, writer = await connect(rig)
        writer.write(request(rig, timeout_s=0.5))
        head, body = await read_answer(reader)
        assert head.startswith(b"HTTP/1.1 200") and body.startswith(b": ping\n\n")
        assert json.loads(body.split(b"\n\n")[-3].removeprefix(b"data: "))["error"]["code"] == "REQUEST_TIMEOUT"
        writer.close()


async def test_pipelined_streams_do_not_mix() -> None:
    async with router_rig([FakeScheduler(step_s=0.005)]) as rig:
        reader, writer = await connect(rig)
        writer.write(b"".join(request(rig, prompt=letter, max_tokens=9) for letter in "abc"))
        assert [texts((await read_answer(reader))[1]) for _ in range(3)] == ["a" * 9, "b" * 9, "c" * 9]
        writer.close()


async def test_http_1_0_client_gets_the_stream_until_close() -> None:
    async with router_rig() as rig:
        reader, writer = await connect(rig)
        writer.write(request(rig, version="1.0", prompt="ab", max_tokens=6))
        whole = await asyncio.wait_for(reader.read(), 60)
        assert whole.startswith(b"HTTP/1.1 200") and b"[DONE]" in whole
        writer.close()


async def test_error_event_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async with router_rig([FakeScheduler(step_s=0.01)]) as rig:
        reader, writer = await connect(rig)
        writer.write(request(rig, max_tokens=1000, timeout_s=2.0))
        _, body = await read_answer(reader)
        frames = body.split(b"\n\n")
        assert json.loads(frames[-3].removeprefix(b"data: "))["error"]["code"] == "REQUEST_TIMEOUT"
        assert frames[-2] == b"data: [DONE]"
        await asyncio.wait_for(rig.scheduler.aborted.wait(), 60)
        writer.close()


async def test_failing_format_fails_only_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire_router.front.http.formats.completion_format import CompletionFormat

    plain = CompletionFormat.frame
    calls = 0

    def frame(self: CompletionFormat, delta: Any) -> bytes:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise Internal("BROKEN", "It is broken.", "Mend it.")
        return plain(self, delta)

    monkeypatch.setattr(CompletionFormat, "frame", frame)
    async with router_rig([FakeScheduler(step_s=0.01)]) as rig:
        answer = await rig.complete("ab", max_tokens=100, stream=True)
        assert "BROKEN" in answer.text and answer.text.endswith("data: [DONE]\n\n")
        await asyncio.wait_for(rig.scheduler.aborted.wait(), 60)
        assert (await rig.complete("ab", max_tokens=3, stream=True)).text.count("data: ") == 4
