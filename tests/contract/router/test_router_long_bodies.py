"""Long bodies are parsed in a child process of the router, whose end harms at most the body that it has in hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.harness.process_cpu import cpu_s
from quire_common.errors import QuireError, TooLarge, Unavailable
from quire_router import metrics
from quire_router.backoff import Backoff
from quire_router.front.http.bodies import body_parser
from quire_router.front.http.bodies.body_parser import BodyParser
from quire_router.front.http.bodies.body_parsers import parse_body
from quire_router.front.parameters.request_limits import Limits
from quire_router.sequences.job import TextPrompt
from tests.contract.router_replicas.test_router_failures import until
from tests.fakes.router.parsed_requests import same
from tests.fakes.router.router_rig import router_rig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler
from tests.unit.router.front.test_parsed_codec import REFUSED, TAKEN

LIMITS = Limits(max_n=128, max_logprobs=20)
TEXT = "a" * 100_000
LONG = json.dumps({"prompt": TEXT}).encode()
MANY = json.dumps({"prompt": list(range(600_000))}).encode()
"""Some 50 ms of processor time."""


@contextlib.asynccontextmanager
async def parser(**options: Any) -> AsyncIterator[BodyParser]:
    made = BodyParser(LIMITS, 4 << 20, **options)
    try:
        yield made
    finally:
        await made.close()
        assert not children()


async def ask(parser: BodyParser, body: bytes, tenant: str = "", name: str = "completion") -> Any:
    return await parser.parse(name, body, tenant, {}, timings=False)


def children() -> list[psutil.Process]:
    """The processes that parse bodies, and have not ended."""
    found = psutil.Process().children()
    return [
        each for each in found if each.status() != psutil.STATUS_ZOMBIE and "body_child" in " ".join(each.cmdline())
    ]


async def child() -> psutil.Process:
    """The one process, as soon as it parses."""
    await until(lambda: len(children()) == 1 and children()[0].nice() > psutil.Process().nice())
    return children()[0]


def text_of(parsed: Any) -> str:
    (prompt,) = parsed.job.prompts
    assert isinstance(prompt, TextPrompt)
    return prompt.text


async def test_child_process_answers_as_the_router_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    async with parser() as long:
        monkeypatch.setattr(body_parser, "LONG_BYTES", 0)
        for name, body in TAKEN:
            content = json.dumps(body).encode()
            assert same(await ask(long, content, name=name), parse_body(name, content, LIMITS, {}, timings=False))
        for name, refused in REFUSED:
            with pytest.raises(QuireError) as there:
                await ask(long, refused, name=name)
            with pytest.raises(QuireError) as here:
                parse_body(name, refused, LIMITS, {}, timings=False)
            assert (type(there.value), str(there.value)) == (type(here.value), str(here.value))
        assert len(children()) == 1


async def test_short_bodies_need_no_process() -> None:
    async with parser() as short:
        assert text_of(await ask(short, b'{"prompt": "a"}')) == "a"
        assert not children()


async def test_process_has_no_secrets_no_torch_and_a_low_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ROUTER_API_KEY", "secret")
    async with parser() as long:
        await ask(long, LONG)
        process = await child()
        assert set(process.environ()) <= {"PYTHONPATH", "PATH", "LC_CTYPE"}
        assert process.nice() == min(19, psutil.Process().nice() + 10)
        assert not any("libtorch" in each.path for each in process.memory_maps())
        assert not [each for each in process.net_connections() if each.status == psutil.CONN_LISTEN]


async def test_body_of_a_process_that_was_killed_is_parsed_by_the_next() -> None:
    async with parser() as long:
        await ask(long, LONG)
        process = await child()
        process.suspend()
        asked = [asyncio.create_task(ask(long, LONG, tenant)) for tenant in ("a", "b")]
        await asyncio.sleep(0.05)
        process.kill()
        assert [text_of(each) for each in await asyncio.gather(*asked)] == [TEXT, TEXT]
        assert (await child()).pid != process.pid


async def test_body_that_breaks_its_process_is_refused_and_its_neighbours_are_not() -> None:
    async with parser() as long:
        await ask(long, LONG)
        process = await child()
        process.suspend()
        ended = metrics.http_body_process_ended.labels("crashed")
        before = ended._value.get()
        asked = [asyncio.create_task(ask(long, LONG, tenant)) for tenant in ("a", "b")]
        await asyncio.sleep(0.05)
        process.send_signal(signal.SIGSEGV)
        process.resume()
        with pytest.raises(Unavailable, match="BODY_PARSER_DIED") as error:
            await asked[0]
        assert error.value.http_status == 503 and error.value.retry_after_s > 0
        assert text_of(await asked[1]) == TEXT
        assert ended._value.get() == before + 1


async def test_body_that_takes_too_much_time_is_refused_and_the_next_is_not() -> None:
    async with parser(max_cpu_s=0.02) as long:
        with pytest.raises(TooLarge, match=r"BODY_TOO_COMPLEX.*time") as error:
            await ask(long, MANY)
        assert error.value.http_status == 413
        assert text_of(await ask(long, LONG)) == TEXT


async def test_cancelled_body_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[object] = []

    async def wait(backoff: object) -> None:
        waits.append(backoff)

    monkeypatch.setattr(Backoff, "wait", wait)
    async with parser() as made:
        await ask(made, LONG)
        (process,) = children()
        before_s = cpu_s(process.pid)
        left = asyncio.ensure_future(ask(made, MANY))
        await until(lambda: cpu_s(process.pid) > before_s)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        await ask(made, LONG)
    assert not waits


async def test_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_parser, "_TIMEOUT_S", 2.0)
    async with parser() as long:
        await ask(long, LONG)
        (await child()).suspend()
        with pytest.raises(Unavailable, match="BODY_PARSER_BUSY"):
            await ask(long, LONG)
        assert text_of(await ask(long, LONG)) == TEXT


async def test_body_that_takes_too_much_memory_is_refused_and_the_next_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_parser, "_MEMORY_BYTES", 16 << 20)
    monkeypatch.setattr(body_parser, "_MEMORY_FACTOR", 0)
    async with parser() as long:
        with pytest.raises(TooLarge, match=r"BODY_TOO_COMPLEX.*memory"):
            await ask(long, MANY)
        assert text_of(await ask(long, LONG)) == TEXT


async def test_largest_bodies_fit_into_the_memory_of_the_process() -> None:
    """The shapes whose objects take the most memory, at the longest body that the router takes by default."""
    count = (4 << 20) - 100
    shapes = {
        "ids": b'{"prompt": [' + b"9," * (count // 2) + b"9]}",
        "floats": b'{"prompt": "a", "user": [' + b".5,".replace(b".", b"0.") * (count // 4) + b"0.5]}",
        "strings": b'{"prompt": [' + b'"a",' * (count // 16) + b'"a"]}',
        "text": b'{"prompt": "' + b"a" * count + b'"}',
    }
    async with parser() as long:
        for name, body in shapes.items():
            with contextlib.suppress(QuireError):
                await ask(long, body)
            try:
                here = parse_body("completion", body, LIMITS, {}, timings=False)
            except QuireError as error:
                with pytest.raises(type(error)) as there:
                    await ask(long, body)
                assert str(there.value) == str(error), name
            else:
                assert same(await ask(long, body), here), name


async def test_tenants_take_turns() -> None:
    async with parser() as long:
        await ask(long, LONG)
        process, order = await child(), list[str]()

        async def one(tenant: str) -> None:
            await ask(long, LONG, tenant)
            order.append(tenant)

        process.suspend()
        asked = [asyncio.create_task(one(tenant)) for tenant in ("flood", "flood", "flood", "flood", "other")]
        await asyncio.sleep(0.05)
        process.resume()
        await asyncio.gather(*asked)
        assert order == ["flood", "flood", "other", "flood", "flood"]


@pytest.mark.parametrize("program", ["/bin/false", "/bin/none"], ids=["it ends", "it cannot be made"])
async def test_process_that_does_not_start_is_an_error_and_is_tried_again(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with parser() as long:
        executable = sys.executable
        monkeypatch.setattr(sys, "executable", program)
        for _ in range(2):
            with pytest.raises(Unavailable, match="BODY_PARSER_FAILED"):
                await ask(long, LONG)
        monkeypatch.setattr(sys, "executable", executable)
        assert text_of(await ask(long, LONG)) == TEXT


async def test_process_ends_with_the_router_that_is_killed(tmp_path: Path) -> None:
    script = """
import asyncio, sys
from quire_router.front.http.bodies.body_parser import BodyParser
from quire_router.front.parameters.request_limits import Limits

async def main():
    parser = BodyParser(Limits(1, 0), 4 << 20)
    await parser.parse("completion", b'{"prompt": "' + b"a" * 100_000 + b'"}', "", {}, timings=False)
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    router = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert router.stdout is not None and await router.stdout.readline() == b"ready\n"
    (process,) = psutil.Process(router.pid).children()
    router.kill()
    await router.wait()
    await until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


async def test_long_and_short_requests_get_the_same_answers() -> None:
    padding = " " * (body_parser.LONG_BYTES + 1)
    headers = {"content-type": "application/json"}
    sampling = {"max_tokens": 2, "seed": 1}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"model": "fake", "prompt": "abc", "max_tokens": 3, "seed": 1}),
        ("/v1/completions", {"model": "nobody", "prompt": "abc"}),
        ("/v1/completions", {"model": "fake", "promt": "abc"}),
        (
            "/inference/v1/generate",
            {"model": "fake", "token_ids": [97], "sampling_params": sampling},
        ),
        ("/invocations", {"model": "fake", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
        ("/invocations", {}),
        ("/tokenize", {"model": "fake", "prompt": "abc"}),
        ("/detokenize", {"model": "fake", "tokens": [97, 98]}),
        (
            "/v1/completions/render",
            {"model": "fake", "prompt": "abc", "kv_transfer_params": {}},
        ),
        ("/v1/responses", {"model": "fake", "input": "abc", "tools": [], "metadata": {"a": "b"}}),
    ]
    changing = {"id", "created", "created_at", "request_id", "output"}
    async with router_rig([FakeScheduler(max_model_len=400)]) as rig:
        for path, body in bodies:
            answers = []
            for content in (json.dumps(body), json.dumps(body) + padding):
                answer = await rig.http.post(path, content=content, headers=headers)
                answers.append((answer.status_code, _without(answer.json(), changing)))
            assert answers[0] == answers[1], path
        process = await child()
    await until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    assert not children(), "it ended with the router"


def _without(value: Any, names: set[str]) -> Any:
    """A JSON value without the members of these names."""
    if isinstance(value, dict):
        return {name: _without(each, names) for name, each in value.items() if name not in names}
    return [_without(each, names) for each in value] if isinstance(value, list) else value
