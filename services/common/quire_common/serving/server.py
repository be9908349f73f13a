"""The life of a service process: bind, start, serve, leave, drain, stop. It is the same for every service.

The port opens at once. Health says that the process lives, but is not ready until `start` returns. On SIGTERM or
SIGINT, a ready service *leaves*: health says that it is not ready, and discovery forgets it. It still serves for
`--drain-delay-s`, so that its callers have time to notice. Then it drains and stops. A second signal ends the delay. If
the start fails, one line is logged with the root cause, its code and its fix, and the process exits with 2.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import ssl
import sys
import threading
import time
from concurrent import futures
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from quire_common.config import ServiceConfig, explain_config, join_address, load_config, split_address
from quire_common.discovery.endpoint import Discovery
from quire_common.errors import QuireError, as_quire_error
from quire_common.identity.exposure import require_private
from quire_common.identity.watched_context import WatchedContext
from quire_common.serving.announcement import PASSIVE, ThreadAnnouncement, announce
from quire_common.serving.health import AioHealth, SyncHealth, loop_answers
from quire_common.serving.heaps import set_malloc_limits
from quire_common.serving.listen_errors import find_listen_error, listen_error
from quire_common.serving.settled import settle
from quire_common.telemetry.interceptors import CallGate, aio_server_interceptors, sync_server_interceptors
from quire_common.telemetry.logs import get_logger, set_identity, setup_logging
from quire_common.telemetry.metrics import serve_metrics
from quire_common.telemetry.metrics_server import Probes
from quire_common.telemetry.process_metrics import show_build, watch_loop_lag
from quire_common.telemetry.tracing import setup_tracing_of, shutdown_tracing
from quire_common.transport import SERVER_OPTIONS, PortLimits, callers_of, server_credentials, tls_files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from quire_common.identity.callers import CallerCheck
    from quire_common.identity.tls_files import TlsFiles

C = TypeVar("C", bound=ServiceConfig)
EXIT_START_FAILED = 2
_EXPLAIN = "--explain-config"
_GRACE_S = 1.0
_SIGNAL_POLL_S = 0.5
_WAITING_PER_THREAD = 8
log = get_logger(__name__)


@dataclass
class BoundServer:
    """The parts of the process around it that a service may use."""

    address: str
    instance: str
    _fail: Callable[[QuireError], None] = field(repr=False)
    _set_serving: Callable[[bool], None] = field(default=lambda up: None, repr=False)
    _gate: CallGate = field(default_factory=CallGate, repr=False)
    _leaving: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def fail(self, error: QuireError) -> None:
        """End the process without a drain; a drain that has begun goes on. The first error given is logged as the
        cause, and the exit code says that it failed. Callable from any thread."""
        self._fail(error)

    def set_serving(self, up: bool) -> None:
        """Set whether an asyncio service that was ready is still ready, for grpc.health.v1. Call this in the service's
        loop. For a threaded service it does nothing. Before the start has succeeded, this only sets the state that will
        hold then. After the stop has begun, it has no effect."""
        self._set_serving(up)

    def when_leaving(self, tell: Callable[[], None]) -> None:
        """Register `tell`, which is called once when a ready service begins to leave, in the service's loop or, for a
        threaded service, in the main thread; after `fail` it is not called. The service then still serves, but
        grpc.health.v1 reports that it is not ready. `tell` can report the same elsewhere."""
        self._leaving.append(tell)

    def leave(self) -> None:
        """Call the functions that `when_leaving` was given. An exception of one is logged: the service still drains."""
        for tell in self._leaving:
            try:
                tell()
            except Exception:
                log.exception("a function of when_leaving failed")

    def guard_calls(self, check: Callable[[str, Mapping[str, str]], None]) -> None:
        """Before an asyncio server reads a call's first message, `check(path, metadata)` may refuse the call with a
        QuireError. It sees each call of a registered method, of health and reflection too. For a threaded server this
        has no effect."""
        self._gate.guard(check)


class AioService(Protocol):
    """A service on asyncio. All methods run in the one loop."""

    name: str

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Add servicers; return their full gRPC names, for health and reflection."""

    async def start(self) -> None:
        """Become ready. The port is open already. A QuireError ends the process."""

    async def drain(self, timeout_s: float) -> None:
        """Refuse new work, let the admitted finish; return when done or after the timeout."""

    async def close(self) -> None:
        """Release everything. Called once, also after a failed start."""


class SyncService(Protocol):
    """A service on threads. `start` runs in a thread of its own, the other methods in the main thread; `drain` and
    `close` may be called while `start` still runs."""

    name: str

    def register(self, server: grpc.Server) -> Sequence[str]:
        """Add servicers; return their full gRPC names, for health and reflection."""

    def start(self) -> None:
        """Become ready. The port is open already. A QuireError ends the process."""

    def drain(self, timeout_s: float) -> None:
        """Refuse new work, let the admitted finish; return when done or after the timeout."""

    def close(self) -> None:
        """Release everything. Called once, also after a failed start."""


def service_main(service: str, cls: type[C], run: Callable[[C], int], argv: Sequence[str] | None = None) -> int:
    """Make the config from flags, environment and file, and run the service with it. This is the body of every
    `__main__`. A config error is logged as a typed error on one line. With `--explain-config`, every value (secrets
    masked) and its origin are printed as JSON, and nothing runs. Returns the exit code: 2 after a config error, 0 after
    `--explain-config`, else that of `run`. `--help`, `--version` and a flag without its value raise SystemExit."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if _EXPLAIN in argv:
            print(json.dumps(explain_config(cls, service, [flag for flag in argv if flag != _EXPLAIN])))
            return 0
        config = load_config(cls, service, argv)
    except QuireError as error:
        setup_logging(service, "info", os.environ.get("QUIRE_LOG_FORMAT", "json"))
        _log_start_failure(error)
        return EXIT_START_FAILED
    return run(config)


def run_aio(
    config: C,
    make_service: Callable[[BoundServer], AioService],
    *,
    metrics_port: bool = True,
    limits: PortLimits | None = None,
    public_tls: TlsFiles | None = None,
) -> int:
    """Run an asyncio service, on uvloop, until a signal or `BoundServer.fail`. Returns the exit code. Without
    `metrics_port`, the service itself serves `--metrics-listen`. `limits` and `public_tls` (the certificate) are for a
    port that clients outside the cluster reach. Limits the C library's heaps for the process."""
    set_malloc_limits()
    return uvloop.run(_serve_aio(config, make_service, metrics_port, limits, public_tls or tls_files(config)))


def public_server(limits: PortLimits | None, gate: CallGate, callers: CallerCheck | None = None) -> grpc.aio.Server:
    """Make an asyncio gRPC server with the interceptors of all services, and `gate` after them. `limits` None: a port
    that only peers reach, with the limits of SERVER_OPTIONS alone. `callers` refuses callers by their certificates."""
    receive_timeout_s = limits.receive_timeout_s if limits else 0.0
    return grpc.aio.server(
        interceptors=[*aio_server_interceptors(receive_timeout_s=receive_timeout_s, callers=callers), gate],
        options=limits.options() if limits else SERVER_OPTIONS,
        maximum_concurrent_rpcs=limits.calls if limits else None,
    )


async def _serve_aio(
    config: ServiceConfig,
    make_service: Callable[[BoundServer], AioService],
    metrics_port: bool,
    limits: PortLimits | None,
    tls: TlsFiles,
) -> int:
    """Run the service from binding its port to its end, and return the exit code: 2 if the start, the service or its
    drain failed, with the first failure logged, else 0. It starts, is announced, and serves until a signal or
    `BoundServer.fail`. Then health says that the service is not ready. Unless it failed, it leaves. Its announcement is
    withdrawn. Unless it failed, it waits for `--drain-delay-s` or another signal, and drains. In any case it is closed.
    If the start fails, it is closed at once. A signal during the start cancels the start; the service is then drained
    and closed without having been announced, and without the delay. With `metrics_port`, metrics and probes are served
    too. With `limits`, clients that stay connected are told to connect anew while the service drains."""
    name = _service_name(config)
    setup_logging(name, config.log_level, config.log_format)
    loop, failures = asyncio.get_running_loop(), list[QuireError]()
    stopped, hurried = asyncio.Event(), asyncio.Event()

    def fail(error: QuireError) -> None:
        """Record the error, and end the service at once, without draining; from any thread."""
        failures.append(error)
        loop.call_soon_threadsafe(stopped.set)
        loop.call_soon_threadsafe(hurried.set)

    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stopped.set)
    service: AioService | None = None
    discovery: Discovery | None = None
    last_calls: asyncio.Future[None] | None = None
    loop_watch: asyncio.Future[None] | None = None
    gate = CallGate()
    server = public_server(limits, gate, callers_of(config, name))
    phase = "start"
    try:
        bound = _bind(server, config, tls, name, fail)
        set_identity(name, bound.instance)
        show_build(name)
        setup_tracing_of(config, name, bound.instance)
        checker = AioHealth()
        bound._set_serving, bound._gate = checker.set_serving, gate
        service = make_service(bound)
        health_pb2_grpc.add_HealthServicer_to_server(checker, server)
        names = service.register(server)
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
        await checker.watch(names)
        await server.start()
        if metrics_port:
            _serve_metrics(config, Probes(lambda: loop_answers(loop), lambda: checker.readiness.ready))
        loop_watch = asyncio.ensure_future(watch_loop_lag())
        log.info("listening", address=bound.address)
        starting, stopping = asyncio.ensure_future(service.start()), asyncio.ensure_future(stopped.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()  # raises what start raised
            settle()
            await checker.ready()
            discovery = await announce(config, name, bound.instance, bound.address)
            log.info("ready", address=bound.address)
        else:
            starting.cancel()
        await stopping
        phase = "stop"
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, hurried.set)
        log.info("stopping")
        await checker.leave()
        if starting.done() and not failures:
            bound.leave()
        if discovery is not None:
            await discovery.close()
        if starting.done() and not failures:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(hurried.wait(), config.drain_delay_s)
        if not failures:
            log.info("draining")
            if limits is not None:
                # Clients that stay connected are told to connect anew, which leads them elsewhere; their calls go on.
                last_calls = asyncio.ensure_future(server.stop(config.drain_timeout_s + _GRACE_S))
            await service.drain(config.drain_timeout_s)
    except QuireError as error:
        failures.append(error)
    except Exception as error:
        log.exception(f"{phase} failed")
        failures.append(as_quire_error(error))
    finally:
        if loop_watch is not None:
            loop_watch.cancel()
        await server.stop(_GRACE_S)
        if last_calls is not None:
            await last_calls
        if service is not None:
            await service.close()
        shutdown_tracing()
    return _exit_code(failures)


def run_sync(config: C, make_service: Callable[[BoundServer], SyncService], max_workers: int = 32) -> int:
    """Run a threaded service from binding its port to its end, and return the exit code, as `_serve_aio` does. It
    starts in a thread, is announced, and serves until a signal or `BoundServer.fail`. Then health says that the service
    is not ready. If its start has ended, its announcement is withdrawn and, unless it failed, it leaves and waits for
    `--drain-delay-s` or another signal. Unless it failed, it drains. In any case it is closed. `max_workers` threads
    answer calls; calls beyond eight times as many are refused. If the start still runs at the end, the process exits
    here at once."""
    name = _service_name(config)
    setup_logging(name, config.log_level, config.log_format)
    stopped, hurried, failures = threading.Event(), threading.Event(), list[QuireError]()

    def fail(error: QuireError) -> None:
        """Record the error, and end the service at once, without draining; from any thread."""
        failures.append(error)
        stopped.set()
        hurried.set()

    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda *_: (hurried if stopped.is_set() else stopped).set())
    service: SyncService | None = None
    starting: threading.Thread | None = None
    announcement = contextlib.ExitStack()
    pool = futures.ThreadPoolExecutor(max_workers, thread_name_prefix="grpc")
    # Calls beyond the threads wait in gRPC's own queue; beyond this they are refused at once (RESOURCE_EXHAUSTED).
    limit = max_workers * _WAITING_PER_THREAD
    interceptors = sync_server_interceptors(callers=callers_of(config, name))
    server = grpc.server(pool, None, interceptors, SERVER_OPTIONS, maximum_concurrent_rpcs=limit)
    phase = "start"
    try:
        bound = _bind(server, config, tls_files(config), name, fail)
        set_identity(name, bound.instance)
        show_build(name)
        setup_tracing_of(config, name, bound.instance)
        service = make_service(bound)
        checker = SyncHealth()
        health_pb2_grpc.add_HealthServicer_to_server(checker, server)
        names = service.register(server)
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
        checker.watch(names)
        server.start()
        _serve_metrics(config, Probes(lambda: True, lambda: checker.readiness.ready))
        log.info("listening", address=bound.address)

        def become_ready(service: SyncService) -> None:
            """Start the service, and exclude its objects from later garbage collections. Then, unless a signal has come
            meanwhile, report that the service is ready and announce it."""
            service.start()
            settle()
            if stopped.is_set():
                return
            checker.ready()
            announced = ThreadAnnouncement(config, name, bound.instance, bound.address)
            announcement.callback(announced.close)
            log.info("ready")

        starting = threading.Thread(target=_start_sync, args=(become_ready, service, fail), name="start", daemon=True)
        starting.start()
        _wait_signal(stopped)
        phase = "stop"
        log.info("stopping")
        checker.leave()
        if not starting.is_alive():
            _withdraw(announcement)
        if not starting.is_alive() and not failures:
            bound.leave()
            _wait_signal(hurried, config.drain_delay_s)
        if not failures:
            log.info("draining")
            service.drain(config.drain_timeout_s)
    except QuireError as error:
        failures.append(error)
    except Exception as error:
        log.exception(f"{phase} failed")
        failures.append(as_quire_error(error))
    finally:
        server.stop(_GRACE_S).wait()
        if service is not None:
            service.close()
        pool.shutdown(wait=False, cancel_futures=True)
        shutdown_tracing()
    code = _exit_code(failures)
    if starting is not None and starting.is_alive():
        _leave(code)
    return code


def _wait_signal(event: threading.Event, limit_s: float = math.inf) -> None:
    """Wait in the main thread until a signal handler or `BoundServer.fail` sets the event, for at most `limit_s`."""
    deadline = time.monotonic() + limit_s
    # A long wait() would keep the main thread from running signal handlers on some platforms.
    while (left_s := deadline - time.monotonic()) > 0 and not event.wait(min(left_s, _SIGNAL_POLL_S)):
        pass


def _withdraw(announcement: contextlib.ExitStack) -> None:
    """Withdraw the announcement, if there is one. If the registry does not answer in time, that is logged, and the
    service drains all the same."""
    try:
        announcement.close()
    except TimeoutError:
        log.warning("the registration was not withdrawn in time", fix="See the registry. The registration expires.")


def _start_sync(
    become_ready: Callable[[SyncService], None], service: SyncService, fail: Callable[[QuireError], None]
) -> None:
    """Start the service by `become_ready`. Runs in a thread of its own; an error is not raised but goes to `fail`, and
    one that is no QuireError is logged with its traceback."""
    try:
        become_ready(service)
    except Exception as error:
        if not isinstance(error, QuireError):
            log.exception("start failed")
        fail(as_quire_error(error))


def _bind(
    server: grpc.aio.Server | grpc.Server,
    config: ServiceConfig,
    tls: TlsFiles,
    name: str,
    fail: Callable[[QuireError], None],
) -> BoundServer:
    """Bind the address of --listen, with TLS if there is a certificate, and return the parts of the process that the
    service may use. `fail` becomes their `fail`. An instance without a name gets one from service and port or address.
    Raises ConfigError if the port cannot be opened (see listen_error), the address is malformed, a TLS file cannot be
    read, or the port would be open to other hosts without TLS."""
    host, _ = split_address(config.listen, "--listen")
    require_private(config, host, "listen", secured=tls.any_pair)
    credentials = server_credentials(tls)
    try:
        if credentials is None:
            bound_port = server.add_insecure_port(config.listen)
        else:
            bound_port = server.add_secure_port(config.listen, credentials)
    except RuntimeError:
        bound_port = 0
    if bound_port == 0:
        cause = find_listen_error(config.listen)
        raise listen_error(cause, f"The {name}", config.listen, "--listen", "port 0 picks a free one")
    address = join_address(host, bound_port)
    advertised = config.advertise or address
    default = f"{name}-{bound_port}" if config.discovery in PASSIVE else f"{name}-{advertised}"
    return BoundServer(address, config.instance or default, fail)


def _serve_metrics(config: ServiceConfig, probes: Probes) -> None:
    """Serve metrics and probes on `--metrics-listen`, if it is given, over TLS if the service has a certificate;
    clients may come without one. Raises ConfigError if the port is taken, the TLS files cannot be used, or other hosts
    could reach the port without TLS."""
    if not config.metrics_listen:
        return
    tls, (host, _) = tls_files(config), split_address(config.metrics_listen, "--metrics-listen")
    require_private(config, host, "metrics_listen", secured=tls.any_pair)
    # Kubernetes' probes have no certificate.
    context = WatchedContext("metrics TLS", tls, ssl.CERT_OPTIONAL) if tls.any_pair else None
    serve_metrics(config.metrics_listen, probes, context)


def _service_name(config: ServiceConfig) -> str:
    """RouterConfig is the router's."""
    return type(config).__name__.removesuffix("Config").lower()


def _exit_code(failures: Sequence[QuireError]) -> int:
    """Return 0 where nothing failed; else log the first failure and return EXIT_START_FAILED."""
    if not failures:
        log.info("stopped")
        return 0
    _log_start_failure(failures[0])
    return EXIT_START_FAILED


def _leave(code: int) -> NoReturn:
    """End the process at once with this exit code, although the start still runs in a thread; output is flushed first.
    If the interpreter ended first, native code of the start would call abort."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _log_start_failure(error: QuireError) -> None:
    log.error("failed", code=error.code, error=error.message, fix=error.fix)
    sys.stderr.flush()
