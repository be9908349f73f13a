"""What the worker tells Prometheus and the trace collector."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from bench.harness.plain_pages import ids
from quire_common.credit import Finish, MoveKind, PageMove
from quire_common.errors import Unavailable
from quire_common.sequence import RequestContext
from quire_common.telemetry import metrics, tracing
from quire_worker.observer import WorkerObserver
from tests.fakes.worker.engine_bench import EngineBench, a_start

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
CONTEXT = RequestContext("abc", traceparent=f"00-{TRACE_ID}-{PARENT_ID}-01")


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    tracing.setup_tracing("worker", "worker-1", "", processor=SimpleSpanProcessor(exporter))
    yield exporter
    tracing.shutdown_tracing()


def test_a_sequence_leaves_a_prefill_and_a_decode_span_under_its_request(spans: InMemorySpanExporter) -> None:
    bench = EngineBench(observer=WorkerObserver())
    bench.grant(a_start(0, [5, 6, 7, 8, 9], [1, 2, 3], max_tokens=3, context=CONTEXT))
    bench.run()
    prefill, decode = spans.get_finished_spans()
    assert (prefill.name, decode.name) == ("prefill", "decode")
    for span in (prefill, decode):
        assert span.context is not None and span.parent is not None
        assert f"{span.context.trace_id:032x}" == TRACE_ID and f"{span.parent.span_id:016x}" == PARENT_ID
    assert prefill.attributes == {"quire.prompt_tokens": 5, "quire.cached_tokens": 0}
    assert decode.attributes == {"quire.output_tokens": 3}
    assert prefill.end_time == decode.start_time


def test_a_sequence_that_failed_in_prefill_has_one_span_that_says_so(spans: InMemorySpanExporter) -> None:
    bench = EngineBench(observer=WorkerObserver(), poison=66)
    bench.grant(a_start(0, [66], [1], context=CONTEXT))
    bench.run()
    (prefill,) = spans.get_finished_spans()
    assert prefill.attributes is not None and prefill.attributes["error.type"] == "STEP_FAILED"


def test_a_sequence_whose_pages_are_lost_has_a_span_with_that_code(spans: InMemorySpanExporter) -> None:
    bench = EngineBench(observer=WorkerObserver())
    bench.grant(a_start(0, [5, 6], [1], max_tokens=3, context=CONTEXT))
    bench.engine.residents.end(0, Finish.ERROR, Unavailable("PAGES_LOST", "Its pages are lost.", "Retry."))
    (prefill,) = spans.get_finished_spans()
    assert prefill.attributes is not None and prefill.attributes["error.type"] == "PAGES_LOST"


def value(name: str, **labels: str) -> float:
    """The sample of these labels, whether or not another test has named the model."""
    samples = (sample for family in metrics.registry.collect() for sample in family.samples if sample.name == name)
    return next((one.value for one in samples if {**one.labels, "model_name": ""} == {**labels, "model_name": ""}), 0.0)


def test_a_sequence_that_cannot_be_traced_ends_like_any_other(
    spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no such context")

    monkeypatch.setattr(tracing, "extract", fail)
    bench = EngineBench(observer=WorkerObserver())
    bench.grant(a_start(0, [5, 6], [1, 2], max_tokens=2, context=CONTEXT))
    assert len(bench.run().tokens[0]) == 2 and not spans.get_finished_spans()
    bench.engine.check_integrity()


def test_steps_tokens_slots_and_moves_are_counted() -> None:
    names = ("quire_worker_steps_total", "quire_worker_step_seconds_count")
    before = [value(name) for name in names]
    prefill, sampled = (value("quire_worker_tokens_total", kind=kind) for kind in ("prefill", "sampled"))
    failed = value("quire_worker_moves_failed_total", kind="load")
    bench = EngineBench(observer=WorkerObserver())
    load = PageMove(1, MoveKind.LOAD, 0, ids(9), (b"h" * 32,))
    bench.grant(a_start(0, [5, 6, 7], [1, 2], max_tokens=4), move=(load,))
    bench.run()
    assert [value(name) for name in names] == [count + 4 for count in before]
    assert value("quire_worker_tokens_total", kind="prefill") == prefill + 3
    assert value("quire_worker_tokens_total", kind="sampled") == sampled + 4
    assert value("quire_worker_moves_failed_total", kind="load") == failed + 1
    assert value("quire_worker_slots", state="running") == 0
