"""One request, one trace: spans of all five services, joined into one tree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import httpx

from quire.local.spec import SERVICES, StackSpec
from quire.local.stack import LocalStack
from tests.otlp_sink import OtlpSink, SinkSpan
from tests.pipeline.page_tiers import PATIENT

# A client's own trace: the router must continue it.
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
PROMPT = "ROMEO:\nBut, soft! what light through yonder window breaks?\nIt is the east, and Juliet is the sun.\n"
PAGES = 3  # full ones of the prompt and its answer
LIMIT_S = 60.0


def services(spans: Sequence[SinkSpan]) -> set[str]:
    return {span.service.removeprefix("quire-") for span in spans}


def whole(spans: Sequence[SinkSpan]) -> bool:
    """Every service had its part, and all pages are stored: a stack that stops before cuts that off, which is a failed
    span."""
    stored = sum(int(span.attributes["quire.pages"]) for span in spans if span.name == "store_pages")
    return services(spans) == set(SERVICES) and stored == PAGES


def test_a_request_is_one_trace_over_five_services(demo_model: Path) -> None:
    with OtlpSink() as sink:
        # A lookup that is given up is a failed span too.
        flags = {name: {"otlp-traces-endpoint": sink.endpoint, **PATIENT.get(name, {})} for name in SERVICES}
        stack = LocalStack(StackSpec("traced", str(demo_model), flags=flags, drain_timeout_s=5.0))
        try:
            answer = httpx.post(
                f"{stack.ready.http}/v1/completions",
                json={"prompt": PROMPT, "max_tokens": 8, "temperature": 0},
                headers={"traceparent": f"00-{TRACE}-{PARENT}-01"},
                timeout=LIMIT_S,
            )
            assert answer.status_code == 200
            sink.wait_for(lambda spans: whole([s for s in spans if s.trace_id == TRACE]), timeout_s=LIMIT_S)
        finally:
            stack.close()
        spans = [span for span in sink.spans() if span.trace_id == TRACE]

    assert services(spans) == set(SERVICES)
    ids = {span.span_id for span in spans}
    roots = [span for span in spans if span.parent_id not in ids]
    assert [(root.service, root.parent_id) for root in roots] == [("quire-router", PARENT)], roots
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        assert span.start_ns <= span.end_ns
        assert not span.failed, span
        while span.parent_id != PARENT:  # every span leads to the one root
            span = by_id[span.parent_id]
