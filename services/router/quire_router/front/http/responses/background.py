"""Background responses: they run on after the client has left, and a client gets or cancels them by their id.

Until its generation has ended, a background response counts as a running request in admission. A slow store takes no
admission slot. If a client cancels a response at another router, that router leaves a mark in the shared store, and the
router that runs the response reads the mark. A response too large for the store is stored as failed. If the store does
not answer, the router retries for a while.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from quire_common.errors import Aborted, QuireError, TooLarge, Unavailable, internal_error
from quire_common.telemetry.logs import get_logger
from quire_router import metrics
from quire_router.front.http.responses.kept_response import pack_response
from quire_router.front.http.responses.store import StoreOutcome
from quire_router.off_loop import off_loop
from quire_router.requests.best_of import whole_answers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from quire_router.front.http.responses.document import ResponseDocument
    from quire_router.front.http.responses.format import ResponsesFormat
    from quire_router.front.http.responses.store import ResponseStore
    from quire_router.requests.generation import Generation

CANCELLED = "RESPONSE_CANCELLED"
FORGOTTEN = "RESPONSE_DELETED"
_POLL_S = 1.0
# Interval and time limit of retries if the store does not take an ended response, and how many retry at a time.
_RETRY_S = 1.0
_RETRY_FOR_S = 120.0
_MOST_RETRIED = 256
_CLOSE_S = 1.0
log = get_logger(__name__)


class _Run:
    """A response that runs in this process. `verdict`: CANCELLED or FORGOTTEN after a client has asked for that, else
    empty."""

    def __init__(self, tenant: str, generation: Generation, document: ResponseDocument) -> None:
        self.tenant = tenant
        self.generation = generation
        self.document = document
        self.verdict = ""

    def end(self, verdict: str) -> None:
        """Set the verdict and cancel the generation. CANCELLED does not replace FORGOTTEN."""
        if self.verdict != FORGOTTEN:
            self.verdict = verdict
        self.generation.cancel(_cancelled(self.verdict))


class BackgroundRuns:
    """All background responses of this process."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store
        self._running: dict[tuple[str, str], _Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._settling = 0

    def __len__(self) -> int:
        """Number of responses that run or wait for the store."""
        return len(self._running)

    def start(
        self, tenant: str, generation: Generation, document: ResponseDocument, answer: ResponsesFormat
    ) -> dict[str, Any]:
        """Start a task that runs the generation to its end and closes it. Then `answer` stores a whole answer; this
        object stores a response that failed or was cancelled. Returns the running response object; `show` shows it to
        other routers. Raises TooLarge if even the running object is larger than the tenant's quota; then no task runs,
        and the caller must close the generation."""
        running = document.running()
        if len(pack_response(running)) > self.store.most_bytes(tenant):
            raise self._too_large(tenant)
        run = self._running[tenant, document.id] = _Run(tenant, generation, document)
        task = asyncio.create_task(self._run(run, answer), name=document.id)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return running

    async def show(self, tenant: str, running: dict[str, Any]) -> None:
        """Let other routers see a response that has just been started, before its client is told of it. If the store
        does not take it now, nothing is raised: this router knows the response, the others only after its end."""
        await self.store.put_running(tenant, running["id"], pack_response(running))

    def running(self, tenant: str, response_id: str) -> dict[str, Any] | None:
        """Return the object of a response that runs in this process, in progress or cancelled, without asking the
        store. Returns None if it does not run here, or is to be deleted."""
        run = self._running.get((tenant, response_id))
        if run is None or run.verdict == FORGOTTEN:
            return None
        return run.document.running("cancelled" if run.verdict else "in_progress")

    async def look_up(self, tenant: str, response_id: str) -> dict[str, Any] | None:
        """Return the same as `running`. If the response runs here, first read the mark with which another router may
        have cancelled or deleted it in the shared store, and obey the mark."""
        run = self._running.get((tenant, response_id))
        if run is not None:
            await self._verdict(run)
        return self.running(tenant, response_id)

    async def cancel(self, tenant: str, response_id: str, *, forget: bool = False) -> None:
        """Cancel a response if it runs in this process. Otherwise, if the store is shared, leave a mark for the router
        that runs it. `forget`: the router that runs the response also deletes it at its end; this mark replaces an
        earlier one. Raises Unavailable if the mark cannot be written."""
        verdict = FORGOTTEN if forget else CANCELLED
        run = self._running.get((tenant, response_id))
        if run is not None:
            run.end(verdict)
        else:
            # Who is forgotten is not just cancelled any more: the later wish does not replace that one.
            await self.store.mark(tenant, response_id, verdict.encode(), replace=forget)

    async def close(self) -> None:
        """Fail all running responses with ROUTER_STOPPED. Wait for at most 1 s until their tasks have stored that, then
        cancel the tasks."""
        for run in self._running.values():
            run.generation.cancel(_stopped())
        if tasks := set(self._tasks):
            await asyncio.wait(tasks, timeout=_CLOSE_S)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, run: _Run, answer: ResponsesFormat) -> None:
        """Wait for the generation's end and close it, so that it leaves admission; then store its outcome. Meanwhile,
        watch the shared store for marks. A failure to store is logged. In the end, forget the run."""
        watch = asyncio.create_task(self._watch(run)) if self.store.shared else None
        try:
            try:
                keep = await self._outcome(run, answer)
            finally:
                run.generation.close()
            await self._settle(run, keep)
        except Exception:
            log.exception("the end of a response in the background was not kept")
        finally:
            if watch is not None:
                watch.cancel()
            del self._running[run.tenant, run.document.id]

    async def _outcome(self, run: _Run, answer: ResponsesFormat) -> Callable[[], Awaitable[StoreOutcome]]:
        """Wait for the whole answer. Returns the function that stores it or, if the generation failed, stores the
        failed response. The function has not been called yet. Raises no exception of the generation; one that is no
        QuireError is logged."""
        try:
            deltas = await whole_answers(run.generation)
            await off_loop(lambda: answer.document(deltas), heavy=run.generation.is_large, tenant=run.tenant)
        except QuireError as error:
            failed = run.document.failed(error)
        except Exception:
            log.exception("a response in the background failed")
            failed = run.document.failed(internal_error())
        else:
            return answer.keep
        return lambda: self._keep(run, failed)

    async def _settle(self, run: _Run, keep: Callable[[], Awaitable[StoreOutcome]]) -> None:
        """Store the outcome by calling `keep`, or do what a verdict demands, and do this again if a verdict comes
        meanwhile. While the store does not take it, try again every second. Give up, count and log after 120 s, or if
        more than 256 responses wait for the store."""
        settled: str | None = None
        kept, until_s = StoreOutcome.KEPT, time.monotonic() + _RETRY_FOR_S
        self._settling += 1
        try:
            while (verdict := await self._verdict(run)) != settled or kept is StoreOutcome.NOT_NOW:
                if kept is StoreOutcome.NOT_NOW and verdict == settled:
                    if time.monotonic() > until_s or self._settling > _MOST_RETRIED:
                        metrics.responses_dropped.labels("redis").inc()
                        log.warning("the end of a response in the background was not kept: the store is away")
                        return
                    await asyncio.sleep(_RETRY_S)
                settled, kept = verdict, await self._settle_as(run, verdict, keep)
        finally:
            self._settling -= 1

    async def _settle_as(self, run: _Run, verdict: str, keep: Callable[[], Awaitable[StoreOutcome]]) -> StoreOutcome:
        """Delete the response if the verdict is FORGOTTEN; store it as cancelled if the verdict is CANCELLED. Otherwise
        store the outcome, or a failed response if the outcome is too large. `keep` stores the outcome. Returns what the
        store said; NOT_NOW if it did not delete the response."""
        if verdict == FORGOTTEN:
            try:
                await self.store.delete(run.tenant, run.document.id)
            except QuireError:
                return StoreOutcome.NOT_NOW
            return StoreOutcome.KEPT
        if verdict == CANCELLED:
            return await self._keep(run, run.document.running("cancelled"))
        kept = await keep()
        if kept is StoreOutcome.TOO_LARGE:
            return await self._keep(run, run.document.failed(self._too_large(run.tenant)))
        return kept

    async def _verdict(self, run: _Run) -> str:
        """Return CANCELLED or FORGOTTEN if a client asked for this, in this process or through another router; else ''.
        A request through another router is a mark in the shared store, which also cancels the generation. If the
        verdict is FORGOTTEN already, the store is not asked; if the store does not answer, the verdict of this process
        counts."""
        if run.verdict != FORGOTTEN and self.store.shared:
            try:
                mark = await self.store.get_mark(run.tenant, run.document.id)
            except QuireError:
                mark = None  # the store is away: what is known here counts
            if mark is not None:
                run.end(mark.decode())
        return run.verdict

    async def _watch(self, run: _Run) -> None:
        """Read the shared store's mark every second until there is a verdict."""
        while not await self._verdict(run):
            await asyncio.sleep(_POLL_S)

    def _too_large(self, tenant: str) -> TooLarge:
        """Make the error for a response that is larger than the tenant's quota."""
        most = self.store.most_bytes(tenant)
        return TooLarge(
            "RESPONSE_TOO_LARGE",
            f"The response is larger than the {most} bytes that may be kept for this key.",
            "Send or ask for less, or raise kept_responses_mib in the key file, or --responses-max-mib.",
        )

    async def _keep(self, run: _Run, ended: dict[str, Any]) -> StoreOutcome:
        """Store the ended response object, without its conversation, and return the outcome. If it is too large, leave
        out the echoed fields of the request that may be long, and try once more; log if it is too large even then."""
        kept = await self.store.put(run.tenant, run.document.id, pack_response(ended), wait=True)
        if kept is StoreOutcome.TOO_LARGE:
            brief = run.document.brief(ended)
            kept = await self.store.put(run.tenant, run.document.id, pack_response(brief), wait=True)
            if kept is StoreOutcome.TOO_LARGE:
                log.warning("the end of a response in the background was not kept: it is too large")
        return kept


def _cancelled(code: str) -> Aborted:
    return Aborted(code, "The response was cancelled.", "Send the request again if you still want the answer.")


def _stopped() -> Unavailable:
    """Make the error ROUTER_STOPPED for responses that still run when the router stops."""
    return Unavailable(
        "ROUTER_STOPPED", "The router that ran this response in the background was stopped.", "Send the request again."
    )
