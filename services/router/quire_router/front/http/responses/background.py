"""Responses that nobody waits for: they run on when the client has gone, and are asked for or cancelled by their id.

Each is a request like any other, with its place in the admission's bounds. What another router was told to cancel is
read from a mark in the shared store.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson

from quire_common.errors import Aborted, QuireError, internal_error
from quire_common.telemetry.logs import get_logger
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
log = get_logger(__name__)


def mark_of(response_id: str) -> str:
    """Return the id under which the store keeps the mark that a response is to be cancelled."""
    return f"{response_id}:cancel"


class _Run:
    """One that runs in this process. `verdict`: CANCELLED or FORGOTTEN once a client asked for that, and it stays
    so."""

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
    """All of this process."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._running: dict[tuple[str, str], _Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, tenant: str, generation: Generation, document: ResponseDocument, answer: ResponsesFormat) -> None:
        """Start a task that runs the generation to its end, which `answer` then keeps."""
        run = self._running[tenant, document.id] = _Run(tenant, generation, document)
        task = asyncio.create_task(self._run(run, answer), name=document.id)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def cancel(self, tenant: str, response_id: str, *, forget: bool = False) -> None:
        """Cancel a response if it runs here; else, in a shared store, leave a mark for the router that runs it.
        `forget`: nothing is kept of it."""
        verdict = FORGOTTEN if forget else CANCELLED
        run = self._running.get((tenant, response_id))
        if run is not None:
            run.end(verdict)
        elif self._store.shared:
            # Who is forgotten is not just cancelled any more: the later wish does not replace that one.
            await self._store.put(tenant, mark_of(response_id), verdict.encode(), replace=forget)

    async def _run(self, run: _Run, answer: ResponsesFormat) -> None:
        """Await the generation's end, keep its outcome, and close it. Meanwhile, watch the shared store for marks. An
        error in keeping is logged."""
        watch = asyncio.create_task(self._watch(run)) if self._store.shared else None
        try:
            keep = await self._outcome(run, answer)
            await self._settle(run, keep)
        except Exception:
            log.exception("the end of a response in the background was not kept")
        finally:
            if watch is not None:
                watch.cancel()
            del self._running[run.tenant, run.document.id]
            run.generation.close()

    async def _outcome(self, run: _Run, answer: ResponsesFormat) -> Callable[[], Awaitable[None]]:
        """Await the answer. Returns the function that keeps it or, where it failed, keeps the failed response."""
        try:
            answer.document(await whole_answers(run.generation))
        except QuireError as error:
            failed = run.document.failed(error)
        except Exception:
            log.exception("a response in the background failed")
            failed = run.document.failed(internal_error())
        else:
            return answer.settle
        return lambda: self._keep(run, failed)

    async def _settle(self, run: _Run, keep: Callable[[], Awaitable[None]]) -> None:
        """Keep the outcome. Where the verdict is CANCELLED, keep a cancelled response instead; where it is FORGOTTEN,
        delete the response. A verdict may come during that step: then the step is done again."""
        settled: str | None = None
        while (verdict := await self._verdict(run)) != settled:
            settled = verdict
            if verdict == FORGOTTEN:
                await self._store.delete(run.tenant, run.document.id)
            elif verdict == CANCELLED:
                await self._keep(run, run.document.running("cancelled"))
            else:
                await keep()

    async def _verdict(self, run: _Run) -> str:
        """Return CANCELLED or FORGOTTEN if a client asked for that, here or through another router; else ''. Unless it
        is FORGOTTEN already, the mark that another router leaves in a shared store is looked for; a mark also cancels
        the generation."""
        if run.verdict != FORGOTTEN and self._store.shared:
            try:
                mark = await self._store.get(run.tenant, mark_of(run.document.id))
            except QuireError:
                mark = None  # the store is away: what is known here counts
            if mark is not None:
                run.end(mark.decode())
        return run.verdict

    async def _watch(self, run: _Run) -> None:
        """Read the shared store's mark every second until there is a verdict."""
        while not await self._verdict(run):
            await asyncio.sleep(_POLL_S)

    async def _keep(self, run: _Run, ended: dict[str, Any]) -> None:
        """Store the ended response object, without messages to go on from."""
        await self._store.put(run.tenant, run.document.id, orjson.dumps({"response": ended, "messages": []}))


def _cancelled(code: str) -> Aborted:
    return Aborted(code, "The response was cancelled.", "Ask again if it is wanted after all.")
