"""Grammars over gRPC, compiled by real child processes: what is hostile costs its sender an error, and nobody else."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from quire.v1 import common_pb2
from quire.v1 import tokenizer_pb2 as pb
from quire_common.errors import InvalidArgument, Overloaded, Unsupported
from quire_common.structured.constraint import constraint_from_pb
from quire_common.telemetry.metrics import registry
from tests.contract.tokenizer.test_tokenizer_service import Stub, chat, children, failure, serving, wait_for
from tests.unit.tokenizer import folders

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
# An idle machine needs less than 2 s; here several suites share the processors.
PATIENCE_S = 20.0


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    async with serving(DEMO) as made:
        yield made


def asked(kind: str, text: Any = "", **options: Any) -> pb.CompileGrammarRequest:
    written = text if isinstance(text, str) else json.dumps(text)
    return pb.CompileGrammarRequest(constraint=common_pb2.Constraint(kind=kind, text=written, **options))


def sample(name: str, **labels: str) -> float:
    return registry.get_sample_value(f"quire_tokenizer_grammar_{name}", labels) or 0.0


async def test_the_stream_answers_as_the_call_does(stub: Stub) -> None:
    request = asked("json_schema", {**CITY, "uniqueItems": True})
    told = await stub.CompileGrammar(request)
    assert constraint_from_pb(told.constraint).text and "uniqueItems" in told.warnings[0]
    call = stub.Tokenize()
    await call.read()
    await call.write(pb.TokenizeRequest(id=3, compile=request))
    await call.write(pb.TokenizeRequest(id=4, compile=asked("json_schema", "{")))
    answers = {answer.id: answer for answer in [await call.read() for _ in range(2)]}
    assert answers[3].compiled.constraint == told.constraint
    assert (answers[4].error.code, answers[4].error.grpc_code) == ("BAD_GRAMMAR", 3)
    await call.done_writing()


async def test_equal_sources_are_compiled_once(stub: Stub) -> None:
    before, hits = sample("compile_seconds_count"), sample("cache_hits_total")
    request = asked("regex", "[ab]{3}")
    answers = await asyncio.gather(*(stub.CompileGrammar(request) for _ in range(8)))
    assert len({each.constraint.digest for each in answers}) == 1
    assert sample("compile_seconds_count") == before + 1
    await stub.CompileGrammar(request)
    assert sample("cache_hits_total") == hits + 1
    for _ in range(2):
        assert (await failure(stub.CompileGrammar(asked("regex", "(a")))).code == "BAD_GRAMMAR"
    assert sample("cache_hits_total") == hits + 2


async def test_one_that_leaves_does_not_end_the_compiling_of_others(stub: Stub) -> None:
    request = asked("choice", ["left", "right"])
    leaving, staying = stub.CompileGrammar(request), stub.CompileGrammar(request)
    await asyncio.sleep(0.05)
    leaving.cancel()
    assert (await staying).constraint.text


HOSTILE = [
    ("json_schema", '{"a":' * 10_000 + "1" + "}" * 10_000, "GRAMMAR_TOO_LARGE"),
    ("json_schema", {"const": "x" * (1 << 20)}, "GRAMMAR_TOO_LARGE"),
    ("json_schema", {"enum": [f"value {n}" for n in range(100_000)]}, "GRAMMAR_TOO_LARGE"),
    ("json_schema", {"$ref": "http://127.0.0.1:1/schema"}, "UNSUPPORTED_KEYWORD"),
    ("json_schema", {"$ref": "#/nowhere"}, "BAD_GRAMMAR"),
    ("json_schema", {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}, ("BAD_GRAMMAR", "UNSUPPORTED_KEYWORD")),
    ("json_schema", {"type": "object", "required": ["a"], "properties": {"a": False}}, "BAD_GRAMMAR"),
    ("regex", "(a{1000}){1000}", ("GRAMMAR_TOO_LARGE", "GRAMMAR_TIMEOUT")),
    ("regex", "x" * (1 << 20), "GRAMMAR_TOO_LARGE"),
    ("regex", "(a)\\1", "BAD_GRAMMAR"),
    ("grammar", "start: start", "BAD_GRAMMAR"),
    ("grammar", "root ::= nowhere", "BAD_GRAMMAR"),
    ("grammar", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000, ("GRAMMAR_CRASHED", "BAD_GRAMMAR", "GRAMMAR_TIMEOUT")),
    ("unheard of", "", "BAD_GRAMMAR"),
]


@pytest.mark.parametrize("kind, text, code", HOSTILE, ids=[f"{n}-{case[0]}" for n, case in enumerate(HOSTILE)])
async def test_hostile_sources_are_refused_and_a_neighbour_is_served(
    stub: Stub, kind: str, text: Any, code: Any
) -> None:
    started = time.monotonic()
    hostile = asyncio.ensure_future(failure(stub.CompileGrammar(asked(kind, text))))
    assert (await stub.Encode(pb.EncodeRequest(texts=["hello"]))).token_ids
    assert (await stub.CompileGrammar(asked("json_schema", CITY))).constraint.text
    error = await hostile
    assert isinstance(error, InvalidArgument) and error.code in (code if isinstance(code, tuple) else (code,))
    assert error.fix and time.monotonic() - started < PATIENCE_S


async def test_too_long_a_source_ends_its_process_and_the_next_has_another() -> None:
    async with serving(DEMO, grammar_timeout_s=0.3, grammar_processes=1) as stub:
        restarts, refusals = sample("process_restarts_total"), sample("refusals_total", reason="timeout")
        error = await failure(stub.CompileGrammar(asked("regex", "(a{1000}){1000}")))
        assert error.code == "GRAMMAR_TIMEOUT"
        assert sample("process_restarts_total") == restarts + 1
        assert sample("refusals_total", reason="timeout") == refusals + 1
        assert (await stub.CompileGrammar(asked("choice", ["a"]))).constraint.text


async def test_memory_of_a_compiling_process_is_bounded() -> None:
    async with serving(DEMO, grammar_memory_mb=64, grammar_timeout_s=20.0) as stub:
        error = await failure(stub.CompileGrammar(asked("regex", "(a{1000}){1000}")))
        assert error.code == "GRAMMAR_CRASHED"
        assert (await stub.CompileGrammar(asked("choice", ["a"]))).constraint.text


async def test_a_killed_process_is_replaced(stub: Stub) -> None:
    before = children()
    await stub.CompileGrammar(asked("choice", ["a"]))
    (child,) = children() - before
    os.kill(child, signal.SIGKILL)
    await wait_for(lambda: child not in children())
    assert (await stub.CompileGrammar(asked("choice", ["b"]))).constraint.text


@pytest.mark.parametrize("shown", [False, True])
async def test_a_model_reasons_before_its_form_only_if_its_template_says_so(tmp_path: Path, shown: bool) -> None:
    template = tmp_path / "template"
    template.write_text("{{ messages[0].content }}" + ("{# <think> #}{{ '<think>' if thinking else '' }}" * shown))
    async with serving(DEMO, chat_template=str(template)) as made:
        request = asked("choice", ["a"])
        request.reasoning = True
        text = (await made.CompileGrammar(request)).constraint.text
        assert ("TEXT" in text) == shown


async def test_a_vocabulary_that_has_no_grammars_refuses_them_alone(tmp_path: Path) -> None:
    async with serving(folders.write_folder(tmp_path / "tiny", "word_piece")) as made:
        for _ in range(2):
            error = await failure(made.CompileGrammar(asked("choice", ["a"])))
            assert isinstance(error, Unsupported) and error.code == "STRUCTURED_OUTPUT_UNSUPPORTED"
        assert (await made.Encode(pb.EncodeRequest(texts=["hello"]))).token_ids


async def test_a_process_that_does_not_start_costs_one_request_and_not_the_tokenizer(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    calls = {
        "COMPILE_PROCESS_FAILED": stub.CompileGrammar(asked("choice", ["a"])),
        "RENDER_PROCESS_FAILED": stub.RenderChat(chat(("user", "a"))),
    }
    for code, call in calls.items():
        error = await failure(call)
        assert isinstance(error, Overloaded) and error.code == code and error.retry_after_s > 0
    monkeypatch.undo()
    assert (await stub.CompileGrammar(asked("choice", ["a"]))).constraint.text


async def test_a_request_that_asks_nothing_is_refused(stub: Stub) -> None:
    assert (await failure(stub.CompileGrammar(pb.CompileGrammarRequest()))).code == "NOTHING_TO_COMPILE"
