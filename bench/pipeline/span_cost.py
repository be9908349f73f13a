"""`python -m bench.pipeline.span_cost`: the CPU time of one trace span, beside that of OpenTelemetry's SDK alone.

A span like those of a request is recorded below a parent, then encoded in a batch as for a collector, and its parent
is written into headers and read from them. The two arms run by turns in one process, without a network. Prints the
least time of each, in microseconds of CPU per span.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans as encode_by_sdk
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from quire_common.telemetry import tracing
from quire_common.telemetry.otlp_spans import encode_spans

BATCH = 512
ATTRIBUTES: dict[str, str | int] = {
    "rpc.system.name": "grpc",
    "rpc.method": "quire.v1.KvStore/Lookup",
    "gen_ai.usage.input_tokens": 512,
}


class Kept(SpanProcessor):
    """Keeps the spans that have ended."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


def cpu_us(work: Callable[[], object]) -> float:
    """Microseconds of CPU per span of a batch."""
    began = time.process_time_ns()
    work()
    return (time.process_time_ns() - began) / BATCH / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="batches of each kind")
    rounds = parser.parse_args().rounds

    by_sdk, ours = Kept(), Kept()
    resource = Resource.create({"service.name": "quire-bench", "service.instance.id": "bench"})
    provider = TracerProvider(ParentBased(TraceIdRatioBased(1.0)), resource, shutdown_on_exit=False)
    provider.add_span_processor(by_sdk)
    tracer, propagator = provider.get_tracer("quire"), TraceContextTextMapPropagator()
    tracing.setup_tracing("bench", "bench", "", processor=ours)
    parent = tracing.start_span("parent")
    context = trace.set_span_in_context(parent)
    headers = tracing.inject_headers(parent)

    def record_by_sdk() -> None:
        for number in range(BATCH):
            tracer.start_span("span", context, attributes=ATTRIBUTES | {"number": number}).end()

    def record() -> None:
        for number in range(BATCH):
            tracing.start_span("span", parent=context, attributes=ATTRIBUTES | {"number": number}).end()

    def carry_by_sdk() -> None:
        for _ in range(BATCH):
            propagator.inject({}, context)
            propagator.extract(headers)

    def carry() -> None:
        for _ in range(BATCH):
            tracing.inject_headers(parent)
            tracing.extract_headers(headers)

    works: dict[str, Callable[[], object]] = {
        "record, SDK": record_by_sdk,
        "record": record,
        "encode, SDK": lambda: encode_by_sdk(by_sdk.spans).SerializeToString(),
        "encode": lambda: encode_spans(ours.spans).SerializeToString(),
        "headers, SDK": carry_by_sdk,
        "headers": carry,
    }
    least = dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
        by_sdk.spans.clear()
        ours.spans.clear()
        for name, work in works.items():
            least[name] = min(least[name], cpu_us(work))
    for name, found in least.items():
        print(f"{name:<14}{found:6.1f} us")


if __name__ == "__main__":
    main()
