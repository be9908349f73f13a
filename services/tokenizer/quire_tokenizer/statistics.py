"""The tokenizer's own metrics and the spans of multiplexed requests. Calls as such are counted by the interceptors."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from quire_common.telemetry.metrics import counter, gauge, histogram
from quire_common.telemetry.tracing import record_span

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quire_tokenizer.detokenize.detokenizer import EndedRequest, StepText

_encoded_tokens = counter("quire_tokenizer_encoded_tokens_total", "Tokens made from text.")
_detokenized_tokens = counter("quire_tokenizer_detokenized_tokens_total", "Tokens of streams turned into text.")
_ended = counter("quire_tokenizer_detokenized_requests_total", "Requests that ended on streams.", ("stopped_by",))
_errors = counter("quire_tokenizer_request_errors_total", "Requests on streams that failed.", ("code",))
_streams = gauge("quire_tokenizer_streams", "Detokenize streams that are open.")
_render_seconds = histogram("quire_tokenizer_render_seconds", "Rendering a conversation, waiting included.")
# Label values are the catalogue's codes: few.
_by_string, _by_engine = _ended.labels("stop_string"), _ended.labels("engine")


def encoded(tokens: int) -> None:
    """Count an encoding."""
    _encoded_tokens.inc(tokens)


def stepped(answer: StepText) -> None:
    """Count one step of a stream."""
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
def streaming() -> Iterator[None]:
    """Count a stream as open."""
    with _streams.track_inprogress():
        yield


def ended(request: EndedRequest) -> None:
    """Count a request that has ended, and record one span for all of its detokenizing, where it is traced."""
    (_by_string if request.stopped_by_string else _by_engine).inc()
    if request.trace is not None:
        attributes = {"quire.tokens": request.tokens, "quire.characters": request.chars}
        record_span("detokenize", request.trace, request.start_ns, request.end_ns, attributes)
