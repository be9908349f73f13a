"""Tests of what a compiler keeps and for whom it works, with processes that answer when the test says so."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire_common.children.child_pool import ChildFailed
from quire_common.children.frames import Frame
from quire_tokenizer.grammar import grammar_compiler
from quire_tokenizer.grammar.grammar_compiler import GrammarCompiler, GrammarLimits
from quire_tokenizer.grammar.grammar_source import GrammarRefused, GrammarSource
from tests.unit.tokenizer import folders

SOURCE = GrammarSource("regex", "a+")


class Children:
    """As a ChildPool. `breaks`: a job that is cancelled ends with an error of its own."""

    def __init__(self, *_: Any) -> None:
        self.jobs: list[asyncio.Future[dict[str, Any]]] = []
        self.breaks = False

    async def run(self, job: bytes) -> Frame:
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.jobs.append(future)
        try:
            return Frame(await future)
        except asyncio.CancelledError:
            if self.breaks:
                raise ChildFailed("crashed") from None
            raise

    async def close(self) -> None:
        pass


Make = Callable[..., tuple[GrammarCompiler, Children]]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    def made(cached_bytes: int = 1 << 20) -> tuple[GrammarCompiler, Children]:
        children = Children()
        monkeypatch.setattr(grammar_compiler, "ChildPool", lambda *_: children)
        limits = GrammarLimits(1, 8, 2.0, 1 << 30, cached=8, cached_bytes=cached_bytes)
        return GrammarCompiler(folders.load(tmp_path), limits), children

    return made


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def answer(warnings: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"text": "start: /a/", "warnings": list(warnings)}


async def finish(compiler: GrammarCompiler, children: Children, source: GrammarSource, outcome: Any) -> bool:
    """Compile a source; the outcome is that of its process, if one is asked. Whether one was."""
    before = len(children.jobs)
    asked = asyncio.ensure_future(compiler.compile(source))
    await settle()
    started = len(children.jobs) > before
    if started:
        (children.jobs[-1].set_exception if isinstance(outcome, Exception) else children.jobs[-1].set_result)(outcome)
    if isinstance(outcome, Exception):
        with pytest.raises(GrammarRefused):
            await asked
    else:
        assert (await asked).constraint.text == outcome["text"]
    return started


async def test_compiling_ends_when_the_last_that_waits_has_left(make: Make) -> None:
    compiler, children = make()
    asked = [asyncio.ensure_future(compiler.compile(SOURCE)) for _ in range(2)]
    await settle()
    asked[0].cancel()
    await settle()
    assert len(children.jobs) == 1 and not children.jobs[0].cancelled()
    asked[1].cancel()
    # One that comes before the old work has ended gets work of its own.
    again = asyncio.ensure_future(compiler.compile(SOURCE))
    await settle()
    assert children.jobs[0].cancelled() and len(children.jobs) == 2
    children.jobs[1].set_result(answer())
    assert (await again).constraint.text == "start: /a/"
    assert not await finish(compiler, children, SOURCE, answer())


async def test_error_that_nobody_waits_for_is_not_reported(make: Make) -> None:
    compiler, children = make()
    children.breaks = True
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
    asked = asyncio.ensure_future(compiler.compile(SOURCE))
    await settle()
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await settle()
    gc.collect()
    await settle()
    assert children.jobs[0].cancelled() and not reports


async def test_source_that_took_its_processor_time_is_not_tried_again_for_a_while(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, children = make()
    slow, spent = ChildFailed("timeout"), ChildFailed("timeout", out_of_cpu=True)
    assert await finish(compiler, children, SOURCE, slow)
    assert await finish(compiler, children, SOURCE, spent)
    assert not await finish(compiler, children, SOURCE, spent)
    monkeypatch.setattr(grammar_compiler, "_TIMEOUT_CACHED_S", 0.01)
    other = GrammarSource("regex", "b+")
    assert await finish(compiler, children, other, spent)
    await asyncio.sleep(0.02)
    assert await finish(compiler, children, other, spent)


async def test_warnings_count_among_the_bytes_that_are_kept(make: Make) -> None:
    compiler, children = make(cached_bytes=4000)
    small, large = GrammarSource("regex", "a"), GrammarSource("regex", "b")
    assert await finish(compiler, children, small, answer())
    assert not await finish(compiler, children, small, answer())
    assert await finish(compiler, children, large, answer(("ü" * 1000,)))
    assert await finish(compiler, children, small, answer()), "the large one took its place"


async def test_close_ends_what_runs(make: Make) -> None:
    compiler, children = make()
    asked = asyncio.ensure_future(compiler.compile(SOURCE))
    await settle()
    await compiler.close()
    assert children.jobs[0].cancelled()
    with pytest.raises(asyncio.CancelledError):
        await asked
