"""A holder of pages whose event stream does what a test says: skip numbers, break, begin a new life."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from quire.v1 import common_pb2 as pb
from quire_common.errors import Unavailable

NAMESPACE = b"n" * 32


class FakePages:
    """`requests` are those of all watchers so far; `watching` how many watch now."""

    def __init__(self, namespace: bytes = NAMESPACE) -> None:
        self.namespace = namespace
        self.held: dict[bytes, None] = {}
        self.boot_id, self.sequence = 1, 0
        self.requests: list[pb.WatchPagesRequest] = []
        self.watching = 0
        self.away = False
        self._queues: list[asyncio.Queue[pb.PageEvents | None]] = []

    def store(self, hashes: Iterable[bytes], *, skip: int = 0) -> None:
        """`skip`: so many numbers are lost on the way."""
        hashes = list(hashes)
        self.held |= dict.fromkeys(hashes)
        self.sequence += 1 + skip
        self._tell(pb.PageEvents(stored=[pb.StoredPages(namespace=self.namespace, hashes=hashes, medium="device")]))

    def remove(self, hashes: Iterable[bytes]) -> None:
        hashes = list(hashes)
        for digest in hashes:
            self.held.pop(digest, None)
        self.sequence += 1
        self._tell(pb.PageEvents(removed=hashes))

    def restart(self) -> None:
        """Another life, of nothing; whoever watches is cut off."""
        self.held.clear()
        self.boot_id, self.sequence = self.boot_id + 1, 0
        self.cut()

    def cut(self) -> None:
        for queue in self._queues:
            queue.put_nowait(None)

    async def watch(self, request: pb.WatchPagesRequest) -> AsyncIterator[pb.PageEvents]:
        if self.away:
            raise Unavailable("AWAY", "Nobody is here.", "Come back.")
        self.requests.append(request)
        queue: asyncio.Queue[pb.PageEvents | None] = asyncio.Queue()
        self._queues.append(queue)
        self.watching += 1
        try:
            if (request.epoch.boot_id, request.after_sequence) != (self.boot_id, self.sequence):
                frame = pb.PageEvents(sequence=self.sequence, snapshot=True, snapshot_complete=True)
                frame.stored.add(namespace=self.namespace, hashes=self.held, medium="device")
                frame.epoch.boot_id = self.boot_id
                yield frame
            else:
                yield pb.PageEvents(sequence=self.sequence, epoch=pb.Epoch(boot_id=self.boot_id))
            while (news := await queue.get()) is not None:
                yield news
            raise Unavailable("CUT", "The stream broke.", "Open another.")
        finally:
            self.watching -= 1
            self._queues.remove(queue)

    def _tell(self, frame: pb.PageEvents) -> None:
        frame.epoch.boot_id, frame.sequence = self.boot_id, self.sequence
        for queue in self._queues:
            queue.put_nowait(frame)
