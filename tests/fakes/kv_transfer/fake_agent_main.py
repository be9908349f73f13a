"""A KV transfer agent process whose carrier keeps pages as files of a folder; run by path, with the folder as first
argument.

Where the folder holds `load.gate` or `store.gate` (see MoverRig.gate), each page of such a move waits for the test.
"""

from __future__ import annotations

import sys
from pathlib import Path

from quire_common.credit import PageMove
from quire_common.pages import PageCorrupt, PageKey, check_page, frame_page
from quire_worker.kv_transfer.agent_handlers import kvstore_handlers
from quire_worker.kv_transfer.agent_main import run_agent
from quire_worker.kv_transfer.setup import AgentSetup
from quire_worker.kv_transfer.transports.transport import PageSink, PageSource


class FolderConnector:
    def __init__(self, folder: Path, setup: AgentSetup) -> None:
        self._folder = folder
        self._namespace = bytes.fromhex(setup.namespace)
        self._dtype = setup.dtype
        self._page_bytes = setup.page_bytes

    transport = ""

    def store(self, move: PageMove, page_source: PageSource) -> int:
        missing = [index for index, digest in enumerate(move.hashes) if not self._file(digest).exists()]
        page_source.request_pages(missing)
        framed = {}
        for index in missing:
            body = bytes(page_source.page_body(index))
            self._pass("store")
            key = PageKey(self._namespace, move.hashes[index])
            framed[self._file(move.hashes[index])] = frame_page(key, self._dtype, body) + body
            page_source.release_page(index)
        for path, data in framed.items():
            part = path.with_suffix(".part")  # it may be killed at any moment
            part.write_bytes(data)
            part.rename(path)
        return len(move.hashes)

    def load(self, move: PageMove, sink: PageSink) -> int:
        for index, digest in enumerate(move.hashes):
            self._pass("load")
            try:
                framed = self._file(digest).read_bytes()
                body = check_page(framed, PageKey(self._namespace, digest), self._dtype, self._page_bytes)
            except PageCorrupt:
                return index
            sink.next_buffer()[:] = body
            sink.commit_page()
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
    run_agent(sys.argv[2:], lambda given: kvstore_handlers(FolderConnector(Path(sys.argv[1]), given.setup), given))
