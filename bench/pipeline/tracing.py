"""`python -m bench.pipeline.tracing`: measures the cost of tracing every request.

Two stacks of the same services with a paced worker run at once. One has no traces. The other sends the spans of all
requests to a collector, a separate process that reads and discards them. They serve the same requests in turn, and also
take turns at being first. The load is closed. The program prints a JSON line for each turn. Then it prints throughput,
first tokens, gaps between tokens and CPU time of the services with traces, divided by those without, with bounds of 95
% by bootstrap over the pairs of turns.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from concurrent import futures
from typing import TYPE_CHECKING, Any

import grpc

from bench.pipeline.paired_stacks import PairedStack, parse_turns, print_ratios, serve_by_turns
from quire.local.spec import SERVICES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

_EXPORT = "opentelemetry.proto.collector.trace.v1.TraceService"


@contextlib.contextmanager
def collector() -> Iterator[tuple[str, Connection]]:
    """Run a collector. Yields its endpoint, and a connection. To anything that is sent on this connection, the
    collector answers with the number of messages that it has received."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_collect, args=(theirs,))
    process.start()
    try:
        yield ours.recv(), ours
    finally:
        process.terminate()
        process.join()


def _collect(parent: Connection) -> None:
    """Serve OTLP until terminated, without reading the spans."""
    got = [0]

    def export(_request: bytes, _context: Any) -> bytes:
        got[0] += 1
        return b""

    server = grpc.server(futures.ThreadPoolExecutor(1))
    handlers: dict[str, Any] = {"Export": grpc.unary_unary_rpc_method_handler(export)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_EXPORT, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    parent.send(f"http://127.0.0.1:{port}")
    while parent.recv():
        parent.send(got[0])


def main() -> None:
    arguments = parse_turns(__doc__)
    with contextlib.ExitStack() as running:
        endpoint, connection = running.enter_context(collector())
        traces: dict[str, dict[str, str | bool]] = {name: {"otlp-traces-endpoint": endpoint} for name in SERVICES}
        load = arguments.step_ms, arguments.streams
        plain, traced = PairedStack("tracing", "plain", *load), PairedStack("tracing", "traced", *load, flags=traces)
        running.callback(plain.stack.close)
        running.callback(traced.stack.close)
        serve_by_turns(plain, traced, arguments)
        connection.send(True)
        print("messages to the collector:", connection.recv())
    print_ratios(plain, traced, "traces")


if __name__ == "__main__":
    main()
