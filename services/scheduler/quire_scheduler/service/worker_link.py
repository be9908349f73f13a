"""WorkerLink: the connection to the replica's worker. It follows the loading of the model, opens the Run stream, passes
Reports to the engine and sends the engine's Grants.

The worker counts as lost if the stream breaks, if its frames cannot be understood, if it is silent, if it sends no
first frame of Load or Run in time, or if it makes no progress in time. Then its requests fail, and the link connects
again, with a backoff, for a new epoch. Frames of another epoch are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Any

import grpc

from quire.v1 import worker_pb2, worker_pb2_grpc
from quire_common.cancellation import is_cancelled
from quire_common.channel import aio_channel
from quire_common.credit import decode_report, encode_grant
from quire_common.credit.hello import epoch_to_pb, scheduler_hello, worker_hello_from_pb
from quire_common.errors import FailedPrecondition, QuireError, Unavailable, as_quire_error, from_message
from quire_common.identity.callers import WORKER
from quire_common.telemetry.logs import get_logger
from quire_scheduler import metrics
from quire_scheduler.service.liveness_monitor import LivenessMonitor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from quire_common.credit import WorkerHello
    from quire_scheduler.config import SchedulerConfig
    from quire_scheduler.service.engine import Engine

log = get_logger(__name__)
_FIRST_BACKOFF_S = 0.1
_LAST_BACKOFF_S = 2.0
_WATCHDOG_S = 0.25
_FREE_POLL_S, _STATUS_S = 1.0, 5.0
# The worker's first frame of a stream may take this multiple of --worker-timeout-s. The hello waits for the end of a
# step that an earlier scheduler started, and this step may itself take --worker-timeout-s.
_FIRST_FRAME_TIMEOUTS = 3
# The error code of a worker that another scheduler has taken over.
_REPLACED = "SCHEDULER_REPLACED"
# If the watchdog wakes this much too late, the process did not run and received nothing meanwhile.
_LATE_S = 0.5


class WorkerLink:
    """One channel to one worker, for the life of the scheduler. The link calls `attached` with True when an epoch
    begins, with False when it ends and after each attempt that fails."""

    def __init__(
        self, config: SchedulerConfig, engine: Engine, attached: Callable[[bool], None] = lambda up: None
    ) -> None:
        self._attached = attached
        self._address = config.worker
        self._timeouts_s = (config.worker_heartbeat_s, config.worker_timeout_s)
        self._channel = aio_channel(config.worker, config, WORKER)
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)
        self._engine = engine
        self._call: Any = None
        # Grants that the stream has not taken yet; at most as many as the policy permits without an answer.
        self._out: asyncio.Queue[worker_pb2.Grant | None] = asyncio.Queue()
        self._kicked: asyncio.Handle | None = None
        self._monitor = LivenessMonitor(*self._timeouts_s, 0.0)
        # The reason for which this side cancelled the stream, if it did.
        self._gave_up = ""
        self._ready = asyncio.Event()
        engine.call_for_grants(self._kick)

    async def run(self) -> None:
        """Follow the worker's loading, then serve an epoch. After each loss or unexpected error, fail its requests and
        try again with a backoff of 0.1 to 2 s, give or take a quarter (0.1 s again after an epoch or an unexpected
        error, which is logged), until cancelled. If another scheduler has taken over the worker, first wait until the
        worker is free or does not answer."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                await self._follow_load()
                await self._serve()
                raise _lost("it ended the stream")
            except (QuireError, grpc.RpcError) as error:
                reason = as_quire_error(error)
                was_attached = self._engine.core is not None
                self._detach(reason)
            except Exception:
                log.exception("the link to the worker broke")
                was_attached, reason = True, _lost("its frames could not be understood")
                self._detach(reason)
            if reason.code == _REPLACED:
                await self._wait_until_free()
            backoff_s = _FIRST_BACKOFF_S if was_attached else min(backoff_s * 2, _LAST_BACKOFF_S)
            await asyncio.sleep(backoff_s * random.uniform(0.75, 1.25))

    async def wait_ready(self) -> None:
        """Wait until the first epoch has begun."""
        await self._ready.wait()

    async def close(self) -> None:
        """End all calls."""
        if self._kicked is not None:
            self._kicked.cancel()
        await self._channel.close()

    async def _wait_until_free(self) -> None:
        """Ask the worker each second, until no scheduler is attached to it or it does not answer. Otherwise two
        schedulers could take the worker from each other again and again, and serve no request. The worker's epoch does
        not help, since it changes late in a takeover."""
        with contextlib.suppress(grpc.RpcError):
            while (await self._stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=_STATUS_S)).attached:
                await asyncio.sleep(_FREE_POLL_S)

    async def _follow_load(self) -> None:
        """Pass the worker's loading progress to the engine, as the phase loading, until the worker ends the stream;
        return if its last message says that the model is ready. Raises the error by which loading fails, after the
        phase has become failed; Unavailable if the stream ends before the model is ready, or if the worker sends
        nothing in time; and grpc.RpcError if the call fails. Only the first message has a time limit: the worker sends
        it at once, but parts of a load may take long."""
        loaded = False
        # A read that is cancelled cancels the call. A call whose load failed is not cancelled: the worker ends when it
        # knows that its error has been received.
        call = self._stub.Load(worker_pb2.LoadRequest())
        progress = await self._read_first(call, "loading progress")
        while progress is not grpc.aio.EOF:
            if progress.HasField("error"):
                error = from_message(progress.error)
                self._engine.set_phase("failed", 0.0, f"{error.code}: {error.message}")
                raise error
            done = progress.done_bytes / progress.total_bytes if progress.total_bytes else 0.0
            self._engine.set_phase("loading", min(done, 1.0), f"{progress.phase} {progress.detail}".strip())
            loaded = progress.phase == "ready" or progress.HasField("model")
            progress = await call.read()
        if not loaded:
            raise _lost("it stopped loading")

    async def _serve(self) -> None:
        """Serve one epoch: open Run, attach the engine, then apply Reports, send Grants and deliver outputs until the
        worker ends the stream. Frames of another epoch are dropped. A watchdog ends the stream if the worker is silent
        or hangs. Raises QuireError or grpc.RpcError if the worker is lost; an error of a frame that cannot be decoded,
        or of the engine, passes on. The call is cancelled in any case; the caller detaches the engine."""
        out = self._out = asyncio.Queue()
        out.put_nowait(scheduler_hello(expects_peers=self._engine.roles.parts))
        self._gave_up = ""
        call = self._stub.Run(_frames(out))
        watchdog: asyncio.Task[None] | None = None
        try:
            hello = await self._read_hello(call)
            self._call = call
            loop = asyncio.get_running_loop()
            self._monitor = LivenessMonitor(*self._timeouts_s, loop.time())
            self._engine.attach(hello)
            self._ready.set()
            self._attached(True)
            log.info("worker attached", worker=self._address, model=hello.model.name, run=hello.epoch.run)
            watchdog = asyncio.ensure_future(self._watch())
            epoch = epoch_to_pb(hello.epoch)
            while (message := await call.read()) is not grpc.aio.EOF:
                if message.epoch != epoch:
                    log.warning("a frame of another epoch was dropped", run=message.epoch.run)
                    continue
                self._monitor.frame_received(loop.time(), message.retired, heartbeat=message.heartbeat)
                report = decode_report(message)
                self._engine.on_report(report)
                # The Grant for the worker's next step goes out first, then the sessions get the outputs of the last
                # step.
                self._send_grants()
                self._engine.flush()
                # Metrics are updated after both are on their way.
                loop.call_soon(metrics.steps, report)
        except asyncio.CancelledError:
            # CancelledError has three causes: this side cancelled the call, the link itself is being closed, or gRPC
            # cancelled the call because a Grant could not be written.
            if not is_cancelled():
                raise _lost(self._gave_up or "a Grant could not be sent") from None
            raise
        finally:
            self._call = None
            if watchdog is not None:
                watchdog.cancel()
            call.cancel()
            out.put_nowait(None)

    async def _read_first(self, call: Any, expected: str) -> Any:
        """Wait for the first frame of a stream, and return it, or EOF. If the worker sends nothing in 3 times
        --worker-timeout-s, logs that it does not send what is `expected`, and raises Unavailable. Raises grpc.RpcError
        if the stream ends by an error."""
        limit_s = _FIRST_FRAME_TIMEOUTS * self._timeouts_s[1]
        try:
            async with asyncio.timeout(limit_s):
                return await call.read()
        except TimeoutError:
            lost = _lost(f"it took the stream, but sent no {expected} in {limit_s:g} s")
            fix = "The scheduler connects again. If this line comes again, see the worker's log and restart the worker."
            log.error("the worker does not answer", worker=self._address, error=lost.message, fix=fix)
            raise lost from None

    async def _read_hello(self, call: Any) -> WorkerHello:
        """Wait for the worker's hello, and return it. Raises QuireError if another frame comes, if the hello has
        another protocol version, or if the worker sends nothing in time; the last is logged. If the stream ends before
        a hello, raises QuireError too, or grpc.RpcError if reading fails."""
        first = await self._read_first(call, "hello")
        if first is grpc.aio.EOF and await call.code() is not grpc.StatusCode.OK:
            raise await _failure(call)
        if first is grpc.aio.EOF or not first.HasField("hello"):
            raise _lost("it sent no hello")
        return worker_hello_from_pb(first.hello)

    def _send_grants(self) -> None:
        """Send Grants until the engine has no more."""
        while self._call is not None and (grant := self._engine.next_grant()) is not None:
            self._monitor.grant_sent(grant.seq)
            self._out.put_nowait(encode_grant(grant))

    def _kick(self) -> None:
        """Schedule one `_grant_and_deliver` for all changes that this turn of the event loop makes outside a Report."""
        if self._kicked is None:
            self._kicked = asyncio.get_running_loop().call_soon(self._grant_and_deliver)

    def _grant_and_deliver(self) -> None:
        """Send Grants and deliver the outputs to the sessions. If that raises, log the error and give up the worker."""
        self._kicked = None
        try:
            self._send_grants()
            self._engine.flush()
        except Exception:
            log.exception("the next Grant could not be made, or outputs could not be delivered")
            self._give_up("its scheduler failed")

    def _give_up(self, why: str) -> None:
        """Cancel the stream to the worker, and record the reason. Without an epoch, nothing happens."""
        if self._call is not None:
            self._gave_up = why
            self._call.cancel()

    async def _watch(self) -> None:
        """Check at least every 0.25 s whether the worker is silent or hangs; if so, log it, give the worker up and
        return. A check that comes late, because this process did not run, begins the measurement anew."""
        loop = asyncio.get_running_loop()
        pause_s = min(_WATCHDOG_S, *(timeout_s / 4 for timeout_s in self._timeouts_s))
        while True:
            before = loop.time()
            await asyncio.sleep(pause_s)
            now = loop.time()
            if now - before > pause_s + _LATE_S:
                self._monitor.restart(now)
            elif why := self._monitor.failure(now, busy=self._engine.busy):
                log.error("the worker is given up", worker=self._address, reason=why)
                self._give_up(why)
                return

    def _detach(self, reason: QuireError) -> None:
        """Tell the engine that the worker is gone, so that its requests fail as WORKER_LOST. The phase stays failed if
        it was, as after a failed load; it becomes failed if another scheduler has the worker, else loading. If an epoch
        had begun, its loss is logged. `attached` is called with False in any case."""
        detail = f"{reason.code}: {reason.message}"
        if self._engine.core is not None:
            log.warning("worker lost", worker=self._address, code=reason.code, reason=reason.message)
        phase = "failed" if self._engine.phase == "failed" or reason.code == _REPLACED else "loading"
        self._engine.detach(worker_lost_error(), phase, detail)
        self._attached(False)


async def _frames(out: asyncio.Queue[worker_pb2.Grant | None]) -> AsyncIterator[worker_pb2.Grant]:
    """Yield the queue's Grants until a None. The None is needed because a call that the worker ends would leave this
    generator waiting."""
    while (grant := await out.get()) is not None:
        yield grant


def worker_lost_error() -> Unavailable:
    """Return the error for requests whose worker went away."""
    return Unavailable(
        "WORKER_LOST", "The worker that ran this request went away.", "Resume it on another replica.", retry_after_s=1.0
    )


def _lost(how: str) -> Unavailable:
    return Unavailable("WORKER_LOST", f"The worker was lost: {how}.", "See the worker's log.")


async def _failure(call: Any) -> QuireError:
    """Return the error of a Run stream that ended before its first frame: the typed form of its gRPC error, else
    FailedPrecondition WORKER_LOST."""
    try:
        await call
    except grpc.RpcError as error:
        return as_quire_error(error)
    return FailedPrecondition("WORKER_LOST", f"{await call.code()}", "See the worker's log.")
