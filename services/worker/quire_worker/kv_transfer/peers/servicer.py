"""The Peer contract: each call is a data connection. What is said, and who may say it, is the session's affair."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from quire.v1 import worker_pb2_grpc
from quire_common.kv_data.connection import DataConnection
from quire_worker.kv_transfer.peers.peer_access import GRPC
from quire_worker.kv_transfer.peers.peer_port import FRAME_S
from quire_worker.kv_transfer.peers.tunnel_stream import read_pieces, shut, tunnel_ends, write_pieces

if TYPE_CHECKING:
    from collections.abc import Iterator

    import grpc

    from quire.v1 import worker_pb2
    from quire_worker.kv_transfer.peers.peer_port import PeerPort


class PeerServicer(worker_pb2_grpc.PeerServicer):
    """Peers that come in are the port's."""

    def __init__(self, port: PeerPort) -> None:
        self._port = port

    def Connect(
        self, request_iterator: Iterator[worker_pb2.PeerBytes], context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.PeerBytes]:
        ours, theirs = tunnel_ends()
        # When all is said, it may take so long to be read: who does not would keep this thread for ever.
        late = threading.Timer(FRAME_S, context.cancel)
        late.daemon = True
        context.add_callback(late.cancel)
        with theirs:
            context.add_callback(lambda: shut(theirs))
            threading.Thread(target=write_pieces, args=(request_iterator, theirs), name="tunnel", daemon=True).start()
            self._port.begin(DataConnection(ours, FRAME_S, tunnelled=True), GRPC, late.start)
            yield from read_pieces(theirs)
