"""GrammarCompiler: compiles grammars for the tokenizer's service, in child processes, and caches them.

Requests with equal sources share one compilation.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections import OrderedDict
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

from quire_common.children.child_pool import ChildFailed, ChildPool
from quire_common.children.child_process import ChildProgram
from quire_common.children.frames import framed
from quire_common.errors import Overloaded, QuireError, Unsupported
from quire_common.structured.constraint import CONSTRAINT_PARAM, MAX_GRAMMAR_BYTES, Constraint
from quire_common.telemetry.logs import get_logger
from quire_tokenizer import statistics
from quire_tokenizer.grammar.grammar_source import KINDS, TOOLS, GrammarRefused, GrammarSource, bad_grammar, too_large
from quire_tokenizer.output_parsing import families
from quire_tokenizer.work_pool import overloaded

if TYPE_CHECKING:
    from quire_tokenizer.vocabulary import Vocabulary

log = get_logger(__name__)
# Canonical text has no whitespace between JSON values, so that a source may be longer.
MAX_SOURCE_BYTES: Final = 2 * MAX_GRAMMAR_BYTES
# The wall-clock limit of a child, as a multiple of its processor time, since it may wait for a processor.
_WALL_FACTOR: Final = 5.0
_ESCAPED_BYTES_PER_CHAR: Final = 12
# A source that exceeded the limit of processor time is refused for so long without another try.
_TIMEOUT_CACHED_S: Final = 60.0
# The bytes of a cached outcome in addition to its texts, roughly.
_ENTRY_BYTES: Final = 1024


@dataclass(frozen=True)
class GrammarLimits:
    """The limits of compiling and of the cache."""

    processes: int
    max_jobs: int
    cpu_s: float
    """The processor time of one compilation."""
    memory_bytes: int
    """The memory of one process, in addition to its tokenizer."""
    cached: int
    """The most grammars and refusals in the cache."""
    cached_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A constraint, and warnings of what it does not enforce."""

    constraint: Constraint
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _CachedOutcome:
    """The result of a compilation, with its size in bytes, and the time until which it is valid."""

    outcome: CompiledGrammar | GrammarRefused
    size: int
    until_s: float


class _Compiling:
    """A compilation in progress, for all requests that wait for it."""

    def __init__(self, task: asyncio.Task[CompiledGrammar]) -> None:
        self.task = task
        self._waiters = 0

    @property
    def abandoned(self) -> bool:
        """Whether the compilation was cancelled because no request waits for it."""
        return self.task.cancelling() > 0

    async def wait(self) -> CompiledGrammar:
        """Wait for the compilation, and return its grammar or raise its error (CancelledError if `close` cancelled it).
        If the caller is cancelled and no other request waits, the compilation is cancelled too."""
        self._waiters += 1
        try:
            await asyncio.wait({self.task})
        finally:
            self._waiters -= 1
            if not self._waiters:
                self.task.cancel()
        return self.task.result()


class GrammarCompiler:
    """Belongs to one event loop. Caches the grammars and refusals of recent sources."""

    def __init__(self, vocabulary: Vocabulary, limits: GrammarLimits) -> None:
        program = ChildProgram(
            "quire_tokenizer.grammar.compile_child",
            (str(limits.memory_bytes), str(limits.cpu_s)),
            MAX_GRAMMAR_BYTES * _ESCAPED_BYTES_PER_CHAR + 64 * 1024,
            _not_started,
            first_frame=framed(_first_frame(vocabulary)),
        )
        timeout_s = limits.cpu_s * _WALL_FACTOR
        self._children = ChildPool(program, limits.processes, limits.max_jobs, timeout_s, _overloaded)
        self._limits = limits
        self._version = metadata.version("llguidance")
        self._cache: OrderedDict[bytes, _CachedOutcome] = OrderedDict()
        self._cached_bytes = 0
        self._running: dict[bytes, _Compiling] = {}
        # The tasks of `_running`, and cancelled ones that have not ended yet.
        self._tasks: set[asyncio.Task[CompiledGrammar]] = set()

    async def compile(self, source: GrammarSource) -> CompiledGrammar:
        """Return the grammar of a source, from the cache, a compilation of an equal source in progress, or a new one.
        Raises GrammarRefused for a source that is wrong or too large, takes too long or breaks its process; refusals
        are cached too, but those for time or a broken process for 60 s at most. Counts an answer from the cache in the
        metrics. Raises Overloaded if too many requests wait or the process does not start, and Unsupported for a
        vocabulary that llguidance cannot read."""
        digest = source.digest()
        cached = self._cache.get(digest)
        if cached is not None and time.monotonic() < cached.until_s:
            self._cache.move_to_end(digest)
            statistics.grammar_found()
            if isinstance(cached.outcome, GrammarRefused):
                raise _copy_of(cached.outcome)
            return cached.outcome
        compiling = self._running.get(digest)
        if compiling is None or compiling.abandoned:
            task = asyncio.create_task(self._compile(source, digest))
            compiling = self._running[digest] = _Compiling(task)
            self._tasks.add(task)
            task.add_done_callback(functools.partial(self._ended, digest))
        return await compiling.wait()

    async def close(self) -> None:
        """End running compilations, and the idle processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._children.close()

    def _ended(self, digest: bytes, task: asyncio.Task[CompiledGrammar]) -> None:
        """Forget a task that is done. Its error is read here, since all requests that waited may have left."""
        self._tasks.discard(task)
        compiling = self._running.get(digest)
        if compiling is not None and compiling.task is task:
            del self._running[digest]
        if not task.cancelled():
            task.exception()

    async def _compile(self, source: GrammarSource, digest: bytes) -> CompiledGrammar:
        """Compile a source in a child process, and cache the grammar or the refusal. A refusal that may depend on how
        busy the machine is is cached for a while at most, and errors other than refusals never. Counts durations,
        refusals and warnings in metrics; a grammar with warnings is logged. Raises the errors of
        `_compile_in_child`."""
        try:
            with statistics.compiling():
                compiled = await self._compile_in_child(source)
        except GrammarRefused as error:
            statistics.grammar_refused(error.reason)
            self._cache_outcome(digest, _copy_of(error), _cache_time_s(error))
            raise
        self._cache_outcome(digest, compiled, math.inf)
        if compiled.warnings:
            statistics.grammar_warned(len(compiled.warnings))
            log.info("a grammar enforces less than its source says", kind=source.kind, warnings=len(compiled.warnings))
        return compiled

    async def _compile_in_child(self, source: GrammarSource) -> CompiledGrammar:
        """Check a source, have a child process compile it, and return the grammar in the answer. Raises GrammarRefused
        if the source is bad, takes too long, ends the process, or fails in it in another way. Raises Unsupported if
        llguidance cannot read the vocabulary (all of these but a bad source are logged), and Overloaded if too many
        sources wait or the process does not start."""
        _check_source(source)
        try:
            answer = (await self._children.run(framed(source.job()))).message
        except ChildFailed as error:
            statistics.grammar_process_ended()
            log.warning("a compiling process ended", how=error.how, kind=source.kind)
            raise _child_failure(error.how, source) from error
        if "unreadable" in answer:
            log.warning("the vocabulary has no grammars", reason=answer["unreadable"])
            raise _unreadable(answer["unreadable"])
        if "refused" in answer:
            code, message, fix = answer["refused"]
            raise GrammarRefused(code, message, fix, param=answer["param"], reason=answer["reason"])
        if "text" not in answer:
            log.warning("a grammar could not be compiled", kind=source.kind, reason=answer.get("failed"))
            raise _child_failure("crashed", source)
        return CompiledGrammar(Constraint.of(answer["text"], self._version), tuple(answer["warnings"]))

    def _cache_outcome(self, digest: bytes, outcome: CompiledGrammar | GrammarRefused, cache_time_s: float) -> None:
        """Replace the cached outcome of a source, and keep the new one for some seconds; 0: not at all. While the cache
        has too many entries or bytes, the least recently used ones are removed."""
        before = self._cache.pop(digest, None)
        if before is not None:
            self._cached_bytes -= before.size
        if not cache_time_s:
            return
        cached = self._cache[digest] = _CachedOutcome(outcome, _size_of(outcome), time.monotonic() + cache_time_s)
        self._cached_bytes += cached.size
        while len(self._cache) > self._limits.cached or self._cached_bytes > self._limits.cached_bytes:
            _, oldest = self._cache.popitem(last=False)
            self._cached_bytes -= oldest.size


def _first_frame(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the first frame for a child process, which describes the model: its tokenizer, EOS ids, added tokens and
    parsers."""
    return {
        "tokenizer": vocabulary.tokenizer.to_str(),
        "eos": sorted(vocabulary.eos_ids),
        "added": vocabulary.added,
        "tool_parser": vocabulary.parsers.tool_parser,
        "reasoning_parser": _reasoning_parser(vocabulary),
    }


def _reasoning_parser(vocabulary: Vocabulary) -> str:
    """Return the name of the model's reasoning parser, if its chat template has a marker of the parser, or the parser
    is Harmony's; else an empty name. Markers in the vocabulary alone are no proof that the model reasons. Such a model
    might start to reason where the grammar allows it, and never end."""
    name = vocabulary.parsers.reasoning_parser
    family = families.REASONING_FAMILIES.get(name)
    templates = "".join(vocabulary.templates.values())
    return name if family is None or family.markers.start in templates or family.markers.end in templates else ""


def _check_source(source: GrammarSource) -> None:
    """Raise GrammarRefused for an unknown kind, or for a source that is too large."""
    if source.kind not in (*KINDS, TOOLS):
        raise bad_grammar(
            f"There is no constraint of the kind {source.kind[:50]!r}.", f"Use one of {', '.join(KINDS)}."
        )
    size = len(source.text.encode(errors="surrogatepass"))
    if size > MAX_SOURCE_BYTES:
        raise too_large(f"The {source.kind} has {size} bytes, at most {MAX_SOURCE_BYTES} are possible.", "Shorten it.")


def _child_failure(how: str, source: GrammarSource) -> GrammarRefused:
    """Return the refusal of a source on which a child process failed: GRAMMAR_TIMEOUT if `how` is "timeout", else
    GRAMMAR_CRASHED."""
    if how == "timeout":
        message, fix = f"The {source.kind} takes too long to compile.", "Simplify it: fewer repeats and alternatives."
        return GrammarRefused("GRAMMAR_TIMEOUT", message, fix, reason="timeout")
    message, fix = f"The {source.kind} broke the process that compiled it.", "Simplify it: it may need too much memory."
    return GrammarRefused("GRAMMAR_CRASHED", message, fix, reason="crashed")


def _cache_time_s(error: GrammarRefused) -> float:
    """Return for how many seconds a refusal is cached: for ever, unless the process was too slow or crashed. Then it is
    _TIMEOUT_CACHED_S if the source used up its processor time, else 0, since another try may succeed."""
    if error.reason not in ("timeout", "crashed"):
        return math.inf
    cause = error.__cause__
    return _TIMEOUT_CACHED_S if isinstance(cause, ChildFailed) and cause.out_of_cpu else 0.0


def _size_of(outcome: CompiledGrammar | GrammarRefused) -> int:
    """Return the approximate size of an outcome in bytes."""
    texts = (
        (outcome.message, outcome.fix)
        if isinstance(outcome, GrammarRefused)
        else (outcome.constraint.text, *outcome.warnings)
    )
    return _ENTRY_BYTES + sum(len(text.encode()) for text in texts)


def _copy_of(refusal: GrammarRefused) -> GrammarRefused:
    """Return a copy of a cached refusal. An exception that is raised twice would collect tracebacks."""
    return GrammarRefused(refusal.code, refusal.message, refusal.fix, param=refusal.param, reason=refusal.reason)


def _unreadable(reason: str) -> Unsupported:
    """Return the error of a request for a model whose vocabulary llguidance cannot read."""
    return Unsupported(
        "STRUCTURED_OUTPUT_UNSUPPORTED",
        f"Structured output does not know vocabularies like this model's: {reason}.",
        "Leave the constraint out, or use a model with a byte-level vocabulary.",
        param=CONSTRAINT_PARAM,
    )


def _overloaded(waiting: int) -> QuireError:
    return overloaded(f"{waiting} grammars are waiting to be compiled.")


def _not_started() -> QuireError:
    """Return the error of a request for which no compiling process could be started."""
    return Overloaded(
        "COMPILE_PROCESS_FAILED",
        "The process that compiles grammars did not start.",
        "Retry; if it stays, see the tokenizer's log.",
        retry_after_s=1.0,
    )
