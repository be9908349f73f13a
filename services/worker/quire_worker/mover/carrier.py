"""Carriers: where pages go and come from. They run in the mover process and see pages as bytes alone."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol

from quire_common.channel import sync_channel
from quire_common.errors import QuireError
from quire_common.kv_client import KvClient
from quire_common.pages import PageCorrupt, PageRun, check_page
from quire_common.sequence import context_to_pb
from quire_common.telemetry.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quire_common.credit import PageMove
    from quire_worker.mover.setup import MoverSetup

    Want = Callable[[Sequence[int]], None]
    Read = Callable[[int], memoryview]
    Write = Callable[[int, memoryview], None]

log = get_logger(__name__)


class Carrier(Protocol):
    """One load and one store run at once, each on a thread of its own, and each must end within a time of its own
    however the other side behaves. Callbacks raise Abandoned where the move is void; it passes through."""

    def store(self, move: PageMove, want: Want, read: Read) -> int:
        """Store the move's pages: `want(indices)` once, for those that are to be sent, then `read(index)` for each of
        them in that order; a body is good until the next call. Returns how many are there now. May raise QuireError."""

    def load(self, move: PageMove, write: Write) -> int:
        """Bring the move's pages, in order, and `write(index, body)` each one that is what its key says. Returns how
        many came, up to the first that did not. May raise QuireError."""


class KvStoreCarrier:
    """The kvstore's portable data path."""

    def __init__(self, client: KvClient, namespace: bytes, dtype: str, page_bytes: int) -> None:
        self._client = client
        self._namespace = namespace
        self._dtype = dtype
        self._page_bytes = page_bytes

    @classmethod
    def connect(cls, setup: MoverSetup) -> KvStoreCarrier:
        """On a channel of its own."""
        client = KvClient(sync_channel(setup.kvstore, setup.service_config()))
        return cls(client, bytes.fromhex(setup.namespace), setup.dtype, setup.page_bytes)

    def store(self, move: PageMove, want: Want, read: Read) -> int:
        """See Carrier. Pages that the store has already count as stored."""
        run, context = PageRun(self._namespace, move.group, move.hashes), context_to_pb(move.context)
        outcome = self._client.put_pages(run, self._dtype, self._page_bytes, read, on_wanted=want, context=context)
        return len(run) - (outcome.wanted - outcome.stored)

    def load(self, move: PageMove, write: Write) -> int:
        """See Carrier. The lease's first pages are those that the move names."""
        run, arrived = PageRun(self._namespace, move.group, move.hashes), 0
        pages = self._client.get_pages(move.lease, range(len(run)), context=context_to_pb(move.context))
        try:
            with contextlib.closing(pages):
                for index, framed in pages:
                    if index != arrived:
                        break
                    write(index, check_page(framed, run.key(index), self._dtype, self._page_bytes))
                    arrived += 1
        except (PageCorrupt, QuireError) as error:
            log.warning("a load ended early", arrived=arrived, wanted=len(run), error=str(error))
        return arrived
