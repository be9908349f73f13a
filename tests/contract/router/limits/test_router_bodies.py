"""Slow and large request bodies share one bound, and harm no other request."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from quire_common.errors import ConfigError
from tests.fakes.router.router_rig import RouterRig, router_rig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler

MIB = 1 << 20
PADDING = " " * (MIB // 2)
# Bytes of bodies count twice.
BODIES: dict[str, Any] = {"max_bodies_mib": 4, "max_body_bytes": MIB}
JSON = {"content-type": "application/json"}


def padded(**fields: Any) -> str:
    return json.dumps({"model": "fake", "max_tokens": 3, **fields}) + PADDING


async def held(rig: RouterRig) -> int:
    lines = (await rig.http.get("/metrics")).text.splitlines()
    (line,) = (line for line in lines if line.startswith("quire_router_http_body_bytes "))
    return int(float(line.split(" ")[1]))


@contextlib.asynccontextmanager
async def slow_bodies(rig: RouterRig, count: int) -> AsyncIterator[None]:
    """So many connections that send half a mebibyte of a body, and no more."""
    host, port = rig.router.http.address.split(":")
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {MIB}\r\n\r\n"
    )
    writers = [(await asyncio.open_connection(host, int(port)))[1] for _ in range(count)]
    try:
        for writer in writers:
            writer.write((head + PADDING).encode())
        yield
    finally:
        for writer in writers:
            writer.close()


async def test_slow_bodies_share_one_bound_and_small_bodies_are_accepted() -> None:
    async with router_rig(**BODIES) as rig:
        counted = 'quire_router_http_refused_total{cause="BODY_MEMORY_FULL"}'
        async with slow_bodies(rig, 8):
            async with asyncio.timeout(30):
                while await held(rig) < 3 * MIB:
                    await asyncio.sleep(0.01)
            assert await held(rig) <= 4 * MIB
            content = padded(prompt="a") + PADDING[: MIB // 3]
            answer = await rig.http.post("/v1/completions", content=content, headers=JSON)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "BODY_MEMORY_FULL")
            assert int(answer.headers["retry-after"]) >= 1 and answer.headers["connection"] == "close"
            assert (await rig.complete("abc", max_tokens=3)).status_code == 200
            assert counted in (await rig.http.get("/metrics")).text
        async with asyncio.timeout(30):
            while await held(rig):
                await asyncio.sleep(0.01)
        answer = await rig.http.post("/v1/completions", content=padded(prompt="abc"), headers=JSON)
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/v1/completions", '{"prompt": "abc", "metadata": {"planted": [1]}}'),
        (
            "/v1/chat/completions",
            '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "metadata": {"planted": [1]}}',
        ),
        ("/invocations", '{"prompt": "abc", "metadata": {"planted": [1]}}'),
        (
            "/v1/messages",
            '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "metadata": {"planted": [1]}}',
        ),
        ("/v1/responses", '{"input": [{"role": "user", "content": "a", "planted": [1]}], "max_output_tokens": 3}'),
    ],
)
async def test_body_is_freed_while_its_answer_runs(path: str, content: str) -> None:
    """A running request kept the whole object that its client had sent."""
    async with router_rig([FakeScheduler()], **BODIES) as rig:
        rig.scheduler.gate.clear()
        running = asyncio.ensure_future(rig.http.post(path, content=content + PADDING, headers=JSON))
        async with asyncio.timeout(10):
            await rig.scheduler.submitted.wait()
            while await held(rig):
                await asyncio.sleep(0.01)
        left = [each for each in gc.get_objects() if type(each) is dict and "planted" in each]
        assert not left
        rig.scheduler.gate.set()
        assert (await running).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/completions", {"prompt": "abc"}), ("/v1/completions", {"prompt": "abc", "use_beam_search": True, "n": 2})],
)
async def test_body_counts_until_its_prompt_is_tokenized(path: str, fields: dict[str, Any]) -> None:
    """Otherwise prompts of any size could wait for a tokenizer that is slow."""
    async with router_rig(**BODIES) as rig:
        rig.tokenizer.awake.clear()
        running = asyncio.ensure_future(rig.http.post(path, content=padded(**fields), headers=JSON))
        async with asyncio.timeout(10):
            while not rig.tokenizer.streamed:
                await asyncio.sleep(0.01)
        assert await held(rig) > MIB // 4
        rig.tokenizer.awake.set()
        assert (await running).status_code == 200
        assert await held(rig) == 0


async def test_body_is_freed_when_its_request_ends() -> None:
    async with router_rig(**BODIES) as rig:
        for content, status in ((padded(prompt="abc"), 200), (padded(prompt=7), 400), ("{" + PADDING, 400)):
            for path in ("/tokenize", "/v1/completions"):
                body = content.replace('"max_tokens": 3, ', "") if path == "/tokenize" else content
                answer = await rig.http.post(path, content=body, headers=JSON)
                assert (answer.status_code, await held(rig)) == (status, 0), (path, answer.text)


async def test_budget_without_room_for_the_longest_body_is_refused() -> None:
    with pytest.raises(ConfigError, match="--max-bodies-mib 15 has no room") as caught:
        async with router_rig(max_bodies_mib=15):
            pytest.fail("the router has started")
    assert caught.value.fix == "Set --max-bodies-mib to 16 or more, or lower --max-body-bytes."


async def test_socket_receive_buffer_of_unread_bodies_is_small() -> None:
    """It grows a receive buffer to megabytes, which no count of ours sees."""
    async with router_rig() as rig:
        host, port = rig.router.http.address.split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(30):
            while not rig.router.http.connections:
                await asyncio.sleep(0.01)
        (connection,) = rig.router.http.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 2 * 128 * 1024  # Linux doubles it
        writer.close()
