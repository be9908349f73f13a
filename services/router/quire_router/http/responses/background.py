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
from quire_router.http.generate import all_deltas

if TYPE_CHECKING:
    from quire_router.core.generation import Generation
    from quire_router.http.responses.document import ResponseDocument
    from quire_router.http.responses.format import ResponsesFormat
    from quire_router.http.responses.store import ResponseStore

CANCELLED = "RESPONSE_CANCELLED"
FORGOTTEN = "RESPONSE_DELETED"
_POLL_S = 1.0
log = get_logger(__name__)


def mark_of(response_id: str) -> str:
    """The id under which a wish to cancel is kept."""
    return f"{response_id}:cancel"


class BackgroundRuns:
    """All of this process."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._running: dict[tuple[str, str], Generation] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, tenant: str, generation: Generation, document: ResponseDocument, answer: ResponsesFormat) -> None:
        """Run it to its end, which `answer` keeps."""
        self._running[tenant, document.id] = generation
        task = asyncio.create_task(self._run(tenant, generation, document, answer), name=document.id)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def cancel(self, tenant: str, response_id: str, *, forget: bool = False) -> None:
        """End it, if it runs here; otherwise whoever runs it is told. `forget`: nothing is kept of it."""
        generation = self._running.get((tenant, response_id))
        if generation is not None:
            generation.cancel(_cancelled(FORGOTTEN if forget else CANCELLED))
        elif self._store.shared:
            await self._store.put(tenant, mark_of(response_id), (FORGOTTEN if forget else CANCELLED).encode())

    async def _run(
        self, tenant: str, generation: Generation, document: ResponseDocument, answer: ResponsesFormat
    ) -> None:
        watch = asyncio.create_task(self._watch(tenant, document.id, generation)) if self._store.shared else None
        try:
            answer.document(await all_deltas(generation))
            await answer.settle()
        except QuireError as error:
            ended = document.running("cancelled") if error.code == CANCELLED else document.failed(error)
            if error.code != FORGOTTEN:
                await self._keep(tenant, document.id, ended)
        except Exception:
            log.exception("a response in the background failed")
            await self._keep(tenant, document.id, document.failed(internal_error()))
        finally:
            if watch is not None:
                watch.cancel()
            del self._running[tenant, document.id]
            generation.close()

    async def _watch(self, tenant: str, response_id: str, generation: Generation) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                mark = await self._store.get(tenant, mark_of(response_id))
            except QuireError:
                continue  # the store is away; it may come back
            if mark is not None:
                generation.cancel(_cancelled(mark.decode()))
                return

    async def _keep(self, tenant: str, response_id: str, ended: dict[str, Any]) -> None:
        await self._store.put(tenant, response_id, orjson.dumps({"response": ended, "messages": []}))


def _cancelled(code: str) -> Aborted:
    return Aborted(code, "The response was cancelled.", "Ask again if it is wanted after all.")
