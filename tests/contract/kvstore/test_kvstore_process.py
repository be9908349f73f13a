"""The kvstore as a process: starts, serves, says goodbye; and traces join across it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.harness.process_cpu import cpu_s
from quire.v1 import common_pb2
from quire_common.kv.kv_client import KvClient
from quire_common.telemetry import tracing
from quire_common.telemetry.interceptors import sync_client_interceptors
from tests.contract.kvstore.kvstore_process import KvstoreProcess
from tests.otlp_sink import OtlpSink
from tests.unit.kvstore.pages import BODY_BYTES, body, chain

if TYPE_CHECKING:
    from collections.abc import Iterator

A = chain("a", 8)


@pytest.fixture
def sink() -> Iterator[OtlpSink]:
    with OtlpSink() as running:
        yield running


def test_kvstore_process_serves_pages_until_it_stops(sink: OtlpSink) -> None:
    process = KvstoreProcess("--ram-bytes", "1000000", "--otlp-traces-endpoint", sink.endpoint)
    try:
        process.wait_ready()
        tracing.setup_tracing("worker", "worker-1", sink.endpoint)
        with grpc.insecure_channel(process.address) as plain:
            channel = grpc.intercept_channel(plain, *sync_client_interceptors(process.address))
            health = health_pb2_grpc.HealthStub(channel)
            serving = health.Check(health_pb2.HealthCheckRequest(service="quire.v1.KvStore"), timeout=30)
            assert serving.status == health_pb2.HealthCheckResponse.SERVING
            client = KvClient(channel, timeout_s=30)
            trace = "0af7651916cd43dd8448eb211c80319c"
            context = common_pb2.RequestContext(request_id="r1", traceparent=f"00-{trace}-b7ad6b7169203331-01")
            assert client.put_pages(A, "uint8", BODY_BYTES, lambda i: body(A, i)).stored == 8
            assert client.lookup(A, context=context).pages == 8
    finally:
        tracing.shutdown_tracing(30)
        code = process.stop()
    assert code == 0, process.lines
    spans = sink.wait_for(lambda spans: sum(span.name.endswith("LookupAndPin") for span in spans) == 2)
    store = {span.name.rpartition("/")[2]: span for span in spans if span.service == "quire-kvstore"}
    worker = {span.name.rpartition("/")[2]: span for span in spans if span.service == "quire-worker"}
    assert sorted(store) == ["BeginPut", "CommitPut", "LookupAndPin", "Put"], "and no health check"
    assert worker["LookupAndPin"].trace_id == store["LookupAndPin"].trace_id == trace
    assert worker["LookupAndPin"].parent_id == "b7ad6b7169203331"
    assert store["LookupAndPin"].parent_id == worker["LookupAndPin"].span_id


def test_kvstore_process_is_small_and_starts_fast() -> None:
    process = KvstoreProcess()
    try:
        process.wait_ready()
        spent_s = cpu_s(process.child.pid)
        status = Path(f"/proc/{process.child.pid}/status").read_text()
        resident_kb = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
    finally:
        code = process.stop()
    assert code == 0
    assert resident_kb < 120 * 1024
    assert spent_s < 3, f"{spent_s} s: of a processor, since a busy machine may take longer"


def test_bad_flag_is_one_line_with_cause_and_fix() -> None:
    process = KvstoreProcess("--ram-bytes", "12")
    _, text = process.child.communicate(timeout=60)
    assert process.child.returncode == 2
    line = json.loads(text.splitlines()[-1])
    assert line["code"] == "BAD_VALUE" and "--ram-bytes" in line["error"] and line["fix"]
