"""The tokenizer's own metrics and the spans of multiplexed requests. Calls as such are counted by the interceptors."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from quire_common.telemetry.metrics import counter, gauge, histogram
from quire_common.telemetry.tracing import record_span
from quire_tokenizer.output_parsing.answer_parsers import TOOL_CALLS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quire_tokenizer.detokenize.detokenizer import EndedRequest, StepText

_encoded_tokens = counter("quire_tokenizer_encoded_tokens_total", "Tokens made from text.")
_detokenized_tokens = counter("quire_tokenizer_detokenized_tokens_total", "Tokens of streams turned into text.")
_ended = counter("quire_tokenizer_detokenized_requests_total", "Requests that ended on streams.", ("stopped_by",))
_errors = counter("quire_tokenizer_request_errors_total", "Requests on streams that failed.", ("code",))
_streams = gauge("quire_tokenizer_streams", "Detokenize streams that are open.")
_parsed = counter("quire_tokenizer_parsed_answers_total", "Answers that a parser has parsed.", ("kind", "parser"))
_parse_failures = counter(
    "quire_tokenizer_parse_failures_total", "Tool calls in answers that are not whole calls.", ("parser", "reason")
)
_render_seconds = histogram("quire_tokenizer_render_seconds", "Rendering a conversation, waiting included.")
_grammar_seconds = histogram("quire_tokenizer_grammar_compile_seconds", "Compiling a grammar, waiting included.")
_grammar_hits = counter("quire_tokenizer_grammar_cache_hits_total", "Grammars that were compiled before.")
_grammar_refusals = counter("quire_tokenizer_grammar_refusals_total", "Sources without a grammar.", ("reason",))
_grammar_warnings = counter("quire_tokenizer_grammar_warnings_total", "Parts of sources that are not enforced.")
_grammar_restarts = counter(
    "quire_tokenizer_grammar_process_restarts_total", "Compiling processes that ended by a source, and were replaced."
)
# Label values are the catalogue's codes: few.
_by_string, _by_engine = _ended.labels("stop_string"), _ended.labels("engine")


def encoded(tokens: int) -> None:
    """Count the tokens of an encoding."""
    _encoded_tokens.inc(tokens)


def stepped(answer: StepText) -> None:
    """Count the tokens of one step of a stream that were used, and the errors of its requests by code."""
    _detokenized_tokens.inc(sum(answer.used))
    for _, error in answer.errors:
        _errors.labels(error.code).inc()


@contextlib.contextmanager
def rendering() -> Iterator[None]:
    """Record how long the `with` block takes, which renders a conversation, whether it succeeds or raises."""
    started = time.perf_counter()
    try:
        yield
    finally:
        _render_seconds.observe(time.perf_counter() - started)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Record how long the `with` block takes, which compiles a grammar, whether it succeeds or raises."""
    started = time.perf_counter()
    try:
        yield
    finally:
        _grammar_seconds.observe(time.perf_counter() - started)


def grammar_found() -> None:
    """Count a grammar, or a refusal, that was kept."""
    _grammar_hits.inc()


def grammar_refused(reason: str) -> None:
    """Count a source without a grammar."""
    _grammar_refusals.labels(reason).inc()


def grammar_warned(number: int) -> None:
    """Count what grammars do not enforce of their sources."""
    _grammar_warnings.inc(number)


def grammar_process_ended() -> None:
    """Count a compiling process that a source ended."""
    _grammar_restarts.inc()


@contextlib.contextmanager
def streaming() -> Iterator[None]:
    """Count a stream as open."""
    with _streams.track_inprogress():
        yield


def ended(request: EndedRequest) -> None:
    """Count a request that has ended, by a stop string or by the engine, its parsers, and the failures of its tool
    calls. Record one span for all of its detokenizing if it is traced."""
    (_by_string if request.stopped_by_string else _by_engine).inc()
    for kind, parser in request.parsers:
        _parsed.labels(kind, parser).inc()
        if kind == TOOL_CALLS:
            for reason in request.parse_failures:
                _parse_failures.labels(parser, reason).inc()
    if request.trace is not None:
        attributes = {"quire.tokens": request.tokens, "quire.characters": request.chars}
        record_span("detokenize", request.trace, request.start_ns, request.end_ns, attributes)
