"""What tests of data connections ask of a running kvstore, and what it counts."""

from __future__ import annotations

import fcntl
import os
import re
import threading
from typing import Any

from quire.v1 import kvstore_pb2
from quire_common.telemetry.metrics import render
from tests.contract.kvstore.data_client import DataClient
from tests.contract.kvstore.test_kvstore_service import A, B, Running, keys
from tests.unit.kvstore.pages import BODY_BYTES, part


def look_up(running: Running, lease_ms: int = 60_000) -> Any:
    request = kvstore_pb2.LookupAndPinRequest(keys=keys(A), lease_ms=lease_ms, direct=True)
    return running.stub.LookupAndPin(request, timeout=60)


def begin(running: Running, page_bytes: int = BODY_BYTES) -> Any:
    request = kvstore_pb2.BeginPutRequest(keys=keys(A), page_bytes=page_bytes)
    return running.stub.BeginPut(request, timeout=60)


def over_tcp(told: Any) -> DataClient:
    return DataClient(("127.0.0.1", told.data_port), told.lease_key)


def over_unix(told: Any) -> DataClient:
    return DataClient(told.arena, told.lease_key)


def refused(path: str, reason: str) -> float:
    found = re.search(rf'data_refused_total{{path="{path}",reason="{reason}"}} ([0-9.]+)', render().decode())
    return float(found.group(1)) if found else 0.0


def eventually_refused(path: str, reason: str, before: float) -> None:
    clock = threading.Event()
    for _ in range(3000):
        if refused(path, reason) > before:
            return
        clock.wait(0.02)
    raise AssertionError(f"{reason} was not counted")


def lent(*pages: bytes) -> int:
    fd = os.memfd_create("lent", os.MFD_ALLOW_SEALING)
    os.write(fd, b"".join(pages))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def begin_of(running: Running) -> Any:
    request = kvstore_pb2.BeginPutRequest(keys=keys(part(B, 0, 1)), page_bytes=BODY_BYTES)
    return running.stub.BeginPut(request, timeout=60)
