"""Waits until services are ready, by asking their interfaces: gRPC health, the worker's load, the router's /readyz."""

from __future__ import annotations

import asyncio
import http.client
import ssl
from collections.abc import Callable, Mapping
from types import MappingProxyType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.local.service_tls import aio_channel
from quire.v1 import worker_pb2, worker_pb2_grpc

# How soon a port that nobody listens on yet is tried again.
_RETRY_S = 0.05
_PROBE_TIMEOUT_S = 5.0
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    # How long one attempt may take; a service that has just begun may be slow to answer.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 200),
]
Report = Callable[[str, float, str], None]


async def wait_serving(address: str, service: str, tls_folder: str = "") -> None:
    """Return when the whole server at the address (health's empty service name) reports SERVING by grpc.health.v1.
    Waits without limit for the port to open, and tries again after errors. `tls_folder`: certificates of the stack;
    the server's certificate must then have the name of `service`."""
    async with aio_channel(address, service, tls_folder, _OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                async for answer in stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True):
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError:
                await asyncio.sleep(_RETRY_S)


async def follow_load(address: str, report: Report, tls_folder: str = "") -> None:
    """Call `report` with each phase of a worker's loading (phase, share from 0 to 1 or -1, detail). Return when the
    worker is ready or has failed. Waits without limit while the worker cannot be reached."""
    async with aio_channel(address, "worker", tls_folder, _OPTIONS) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        while True:
            try:
                async for frame in stub.Load(worker_pb2.LoadRequest(), wait_for_ready=True):
                    share = frame.done_bytes / frame.total_bytes if frame.total_bytes else -1.0
                    report(frame.phase, share, frame.detail)
                return
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    return  # the worker says why in its log, and ends
                await asyncio.sleep(_RETRY_S)


async def wait_http_ready(host: str, port: int, *, tls: bool) -> None:
    """Return when GET /readyz answers 200; it is tried again every 50 ms, without limit."""
    while await asyncio.to_thread(http_get, host, port, "/readyz", tls=tls) is None:
        await asyncio.sleep(_RETRY_S)


def http_get(
    host: str, port: int, path: str, *, tls: bool, headers: Mapping[str, str] = MappingProxyType({})
) -> bytes | None:
    """Return the body of a GET request to a router on this host; None if the connection fails, the answer is not 200,
    or nothing comes for 5 s. The certificate is not checked."""
    if tls:
        # Our own child on this host: the certificate names the public host, and nothing secret is sent.
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            host, port, timeout=_PROBE_TIMEOUT_S, context=context
        )
    else:
        connection = http.client.HTTPConnection(host, port, timeout=_PROBE_TIMEOUT_S)
    try:
        connection.request("GET", path, headers=dict(headers))
        answer = connection.getresponse()
        return answer.read() if answer.status == http.client.OK else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
