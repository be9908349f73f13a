"""PageWatchers: the page streams of all schedulers and kvstores that discovery names, and the sweeping of pages whose
holders have left."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from quire_router import metrics
from quire_router.ending_tasks import EndingTasks
from quire_router.pages.page_holder import PageHolder
from quire_router.pages.page_stream import PageStream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quire_common.discovery import Endpoint
    from quire_router.config import RouterConfig
    from quire_router.pages.page_directory import PageDirectory

_TICK_S = 0.5


class PageWatchers:
    """The streams of all holders. All methods run in the event loop. `moved` is called with a holder's service,
    instance, number and life when the number or the life has changed; see PageHolder."""

    def __init__(
        self, config: RouterConfig, directory: PageDirectory, moved: Callable[[str, str, int, int], None]
    ) -> None:
        self._config = config
        self._directory = directory
        self._moved = moved
        self._streams: dict[tuple[str, str], tuple[PageStream, asyncio.Task[None]]] = {}
        self._ending = EndingTasks()
        self._dropped = 0

    def update(self, service: str, endpoints: Sequence[Endpoint]) -> None:
        """Follow exactly the endpoints of discovery's newest list of a service. The pages of endpoints that have left,
        or have another address, are forgotten, and their streams cancelled."""
        wanted = {(service, endpoint.instance): endpoint.address for endpoint in endpoints}
        for key, (stream, task) in list(self._streams.items()):
            if key[0] == service and wanted.get(key) != stream.address:
                del self._streams[key]
                stream.holder.forget()
                self._ending.drop(task)
        for key, address in wanted.items():
            if key not in self._streams:
                holder = PageHolder(self._directory, partial(self._moved, *key))
                stream = PageStream(*key, address, self._config, holder)
                task = asyncio.create_task(stream.run(), name=f"pages of {key[1]}")
                self._streams[key] = (stream, task)

    async def run(self) -> None:
        """Twice a second, remove the pages of holders that have left, and set the index's metrics; until cancelled. The
        event loop runs other tasks between the steps."""
        while True:
            await asyncio.sleep(_TICK_S)
            for _ in self._directory.sweep():
                await asyncio.sleep(0)
            self._set_metrics()

    async def close(self) -> None:
        """Cancel all streams and wait for their end, also for that of streams that were cancelled before."""
        for _, task in self._streams.values():
            self._ending.drop(task)
        self._streams.clear()
        await self._ending.wait()

    def _set_metrics(self) -> None:
        """Set the metrics of the page index: reported and expected pages, memory, holders, and pages without room."""
        directory = self._directory
        metrics.page_index_pages.labels("told").set(len(directory.reported))
        metrics.page_index_pages.labels("expected").set(directory.expected)
        metrics.page_index_bytes.set(directory.nbytes)
        metrics.page_index_holders.set(directory.present)
        metrics.page_index_dropped.inc(directory.dropped - self._dropped)
        self._dropped = directory.dropped
