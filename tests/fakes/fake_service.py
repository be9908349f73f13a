"""A service in name only: the health, load and HTTP faces that a supervisor sees, with switches for what goes wrong.

Run as `python fake_service.py NAME [switches] --listen=... ...`; flags of real services are accepted and ignored.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from quire.v1 import worker_pb2, worker_pb2_grpc

LOOK_S, TOLD_LIMIT_S, HANG_S = 0.1, 60.0, 3600.0
SERVING = health_pb2.HealthCheckResponse.SERVING


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--listen", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--fail", default="", help="CODE: log a typed error and exit with 2")
    parser.add_argument("--fail-beside", default="", help="DIRECTORY:COUNT: fail once so many services are about to")
    parser.add_argument("--crash", action="store_true", help="die of an exception")
    parser.add_argument("--fail-once", default="", help="file: PORT_IN_USE while it does not exist, then create it")
    parser.add_argument("--fail-while", default="", help="file: the typed error GONE while it exists")
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--hang-once", default="", help="file: when it exists at the start, remove it and hang")
    parser.add_argument("--ready-after-s", type=float, default=0.0, help="of a worker: once its loading was told")
    parser.add_argument("--die-once", default="", help="file: when it exists, remove it and die of a typed error")
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--grandchild", action="store_true", help="start a process that outlives this one")
    parser.add_argument("--dump", default="", help="file: write command line and environment")
    return parser.parse_known_args()[0]


def log(**record: object) -> None:
    print(json.dumps({"ts": time.time(), **record}), flush=True)


def typed_failure(code: str) -> int:
    log(level="error", message="failed", code=code, error=f"the cause of {code}", fix=f"the fix of {code}")
    return 2


def wait_for_others(name: str, beside: str) -> None:
    """Write a file of this service's name, and wait until the directory holds COUNT files."""
    directory, _, count = beside.rpartition(":")
    (Path(directory) / name).touch()
    limit = time.monotonic() + TOLD_LIMIT_S
    while len(list(Path(directory).iterdir())) < int(count) and time.monotonic() < limit:
        time.sleep(0.01)


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    def __init__(self) -> None:
        self.told = threading.Event()

    def Load(self, request: worker_pb2.LoadRequest, context: object) -> Iterator[worker_pb2.LoadProgress]:
        for done in (25, 50, 100):
            yield worker_pb2.LoadProgress(phase="weights", done_bytes=done, total_bytes=100, detail="a shard")
        yield worker_pb2.LoadProgress(phase="ready")
        self.told.set()


class Readyz(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Be quiet."""


def main() -> int:
    options = arguments()
    if options.dump:
        Path(options.dump).write_text(json.dumps({"argv": sys.argv, "environ": dict(os.environ)}))
    if options.fail_beside:
        wait_for_others(options.name, options.fail_beside)
    if options.fail:
        return typed_failure(options.fail)
    if options.crash:
        raise RuntimeError("the last words")
    if options.fail_once and not Path(options.fail_once).exists():
        Path(options.fail_once).touch()
        return typed_failure("PORT_IN_USE")
    if options.fail_while and Path(options.fail_while).exists():
        return typed_failure("GONE")
    if options.hang_once and Path(options.hang_once).exists():
        Path(options.hang_once).unlink()
        time.sleep(HANG_S)
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, (lambda *_: None) if options.ignore_sigterm else (lambda *_: stopped.set()))
    if options.grandchild:
        subprocess.Popen([sys.executable, "-c", "import signal, time; time.sleep(3600)"])
    server = grpc.server(futures.ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
    checker = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checker, server)
    worker = FakeWorker()
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    checker.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    server.add_insecure_port(options.listen)
    server.start()
    if options.name == "router":
        web = http.server.ThreadingHTTPServer((options.host, options.port), Readyz)
        threading.Thread(target=web.serve_forever, daemon=True).start()
    if options.ready_after_s:
        worker.told.wait(TOLD_LIMIT_S)
    if not options.never_ready and not stopped.wait(options.ready_after_s):
        checker.set("", SERVING)
        log(message="ready")
    word = Path(options.die_once) if options.die_once else None
    while not stopped.wait(LOOK_S):
        if word is not None and word.exists():
            word.unlink()
            os._exit(typed_failure("DIED_LATER"))
    server.stop(0.2).wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
