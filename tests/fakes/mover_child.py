"""A mover process whose carrier keeps pages as files of a folder; run by path, with the folder as first argument.

Where the folder holds `load.gate` or `store.gate` (see MoverRig.gate), each page of such a move waits for the test.
"""

from __future__ import annotations

import sys
from pathlib import Path

from quire_common.credit import PageMove
from quire_common.pages import PageCorrupt, PageKey, check_page, frame_page
from quire_worker.mover.child import run_child
from quire_worker.mover.lanes import lanes
from quire_worker.mover.setup import MoverSetup
from quire_worker.mover.transports.transport import Landing, Shipment


class FolderCarrier:
    def __init__(self, folder: Path, setup: MoverSetup) -> None:
        self._folder = folder
        self._namespace = bytes.fromhex(setup.namespace)
        self._dtype = setup.dtype
        self._page_bytes = setup.page_bytes

    transport = ""

    def store(self, move: PageMove, shipment: Shipment) -> int:
        missing = [index for index, digest in enumerate(move.hashes) if not self._file(digest).exists()]
        shipment.want(missing)
        framed = {}
        for index in missing:
            body = bytes(shipment.body(index))
            self._pass("store")
            key = PageKey(self._namespace, move.hashes[index])
            framed[self._file(move.hashes[index])] = frame_page(key, self._dtype, body) + body
            shipment.gone(index)
        for path, data in framed.items():
            part = path.with_suffix(".part")  # it may be killed at any moment
            part.write_bytes(data)
            part.rename(path)
        return len(move.hashes)

    def load(self, move: PageMove, landing: Landing) -> int:
        for index, digest in enumerate(move.hashes):
            self._pass("load")
            try:
                framed = self._file(digest).read_bytes()
                body = check_page(framed, PageKey(self._namespace, digest), self._dtype, self._page_bytes)
            except PageCorrupt:
                return index
            landing.room()[:] = body
            landing.land()
        return len(move.hashes)

    def _file(self, digest: bytes) -> Path:
        return self._folder / digest.hex()

    def _pass(self, kind: str) -> None:
        gate = self._folder / f"{kind}.gate"
        if gate.exists():
            with (self._folder / f"{kind}.reached").open("wb", buffering=0) as reached:
                reached.write(b"x")
            with gate.open("rb", buffering=0) as opened:
                opened.read(1)


if __name__ == "__main__":
    run_child(sys.argv[2:], lambda given: lanes(FolderCarrier(Path(sys.argv[1]), given.setup), given))
