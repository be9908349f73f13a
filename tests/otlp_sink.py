"""A tiny OTLP collector for tests: keeps the spans that services send, and wakes who waits for them."""

from __future__ import annotations

import threading
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.certificates import HOST

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from tests.certificates import TlsFiles


@dataclass(frozen=True)
class SinkSpan:
    """What a test wants to know of a span; ids are hex, `parent_id` is empty for a root."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    failed: bool
    events: tuple[str, ...] = ()


class OtlpSink(trace_service_pb2_grpc.TraceServiceServicer):
    """`with OtlpSink() as sink:` serves at `sink.endpoint` on a free port; over TLS with the files given."""

    def __init__(self, tls: TlsFiles | None = None) -> None:
        self._spans: list[SinkSpan] = []
        self._changed = threading.Condition()
        self._pool = futures.ThreadPoolExecutor(2)
        self._server = grpc.server(self._pool)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]  # generated
        if tls is None:
            self.endpoint = f"http://{HOST}:{self._server.add_insecure_port(f'{HOST}:0')}"
        else:
            pair = Path(tls.key).read_bytes(), Path(tls.cert).read_bytes()
            port = self._server.add_secure_port(f"{HOST}:0", grpc.ssl_server_credentials([pair]))
            self.endpoint = f"https://{HOST}:{port}"

    def __enter__(self) -> OtlpSink:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.stop(0).wait()
        self._pool.shutdown()

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        with self._changed:
            for resource in request.resource_spans:
                identity = _attributes(resource.resource.attributes)
                for scope in resource.scope_spans:
                    self._spans.extend(_span(identity, span) for span in scope.spans)
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self) -> list[SinkSpan]:
        with self._changed:
            return list(self._spans)

    def wait_for(self, enough: Callable[[Sequence[SinkSpan]], bool], timeout_s: float = 30.0) -> list[SinkSpan]:
        """The spans as soon as `enough` holds of them; fails with what came otherwise."""
        with self._changed:
            if not self._changed.wait_for(lambda: enough(self._spans), timeout_s):
                got = ", ".join(f"{span.service}:{span.name}" for span in self._spans)
                raise AssertionError(f"the spans did not come within {timeout_s} s; got [{got}]")
            return list(self._spans)


def _span(identity: dict[str, Any], span: Any) -> SinkSpan:
    return SinkSpan(
        service=identity.get("service.name", ""),
        instance=identity.get("service.instance.id", ""),
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        failed=span.status.code == 2,
        events=tuple(event.name for event in span.events),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
