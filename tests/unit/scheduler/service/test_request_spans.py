"""One span per request below the router's, with its queueing; the worker is told to hang below it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from quire_common.errors import QuireError
from quire_common.sequence import RequestContext
from quire_common.telemetry.tracing import setup_tracing, shutdown_tracing
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.service.engine import Engine
from tests.fakes.scheduler.scheduler_rig import a_sequence
from tests.fakes.worker.fake_worker import FakeWorker, make_hello

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    setup_tracing("scheduler", "test", "", processor=SimpleSpanProcessor(exporter))
    yield exporter
    shutdown_tracing()


async def test_request_spans_join_the_routers_trace_and_the_workers(spans: InMemorySpanExporter) -> None:
    engine, worker = Engine(SchedulerConfig()), FakeWorker(make_hello())
    engine.attach(worker.hello)
    context = RequestContext("r", traceparent=f"00-{TRACE}-{PARENT}-01")
    engine.submit(1, 7, context, a_sequence(5, 3))
    with pytest.raises(QuireError):
        engine.submit(1, 8, context, a_sequence(5, 0))
    grant = engine.next_grant()
    assert grant is not None
    worker.deliver(grant)
    while (report := worker.step()) is not None:
        engine.on_report(report)
    by_name = {span.name: span for span in spans.get_finished_spans() if span.status.is_ok}
    request, queue = by_name["scheduler.request"], by_name["scheduler.queue"]
    assert request.parent is not None and request.context is not None and queue.parent is not None
    assert f"{request.parent.span_id:016x}" == PARENT and f"{request.context.trace_id:032x}" == TRACE
    assert queue.parent.span_id == request.context.span_id
    handed_on = worker.seen[0].start[0].context.traceparent
    assert handed_on == f"00-{TRACE}-{request.context.span_id:016x}-01"
    assert request.attributes is not None and request.attributes["gen_ai.usage.output_tokens"] == 3
    assert [event.name for event in request.events] == ["first token"]
    failed = [span for span in spans.get_finished_spans() if not span.status.is_ok]
    assert [(span.attributes or {}).get("error.type") for span in failed] == ["BAD_MAX_TOKENS"]


async def test_preemptions_are_events_of_the_requests_span(spans: InMemorySpanExporter) -> None:
    engine, worker = Engine(SchedulerConfig()), FakeWorker(make_hello(num_pages=8, page_size=4))
    engine.attach(worker.hello)
    for handle in (1, 2, 3):
        engine.submit(1, handle, RequestContext("r"), a_sequence(4, 16))
    assert engine.core is not None
    while not engine.core.idle:
        while (grant := engine.next_grant()) is not None:
            worker.deliver(grant)
        report = worker.step()
        assert report is not None
        engine.on_report(report)
    requests = [span for span in spans.get_finished_spans() if span.name == "scheduler.request"]
    preempted = [[event for event in span.events if event.name == "preempted"] for span in requests]
    counted = [(span.attributes or {})["quire.preemptions"] for span in requests]
    assert sum(map(len, preempted)) > 0 and list(map(len, preempted)) == counted
    for span, events in zip(requests, preempted, strict=True):
        assert span.start_time is not None and span.end_time is not None
        assert all(span.start_time <= event.timestamp <= span.end_time for event in events)
