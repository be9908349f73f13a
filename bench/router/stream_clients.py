"""Raw clients of server-sent events in one process. They open the streams, record when each event came, and save the
records.

    python -m bench.router.stream_clients --url http://127.0.0.1:8000 --streams 256 --tokens 400 --heard heard.json

The clients parse only the ends of events, so they cost little compared with the router. The arrival of an event is its
arrival in the kernel, however late this process reads it. If several events are read at once, all get the time of the
last.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import struct
import sys
import time
from pathlib import Path

_EVENT = b"data: {"
_DONE = b"data: [DONE]"
# Linux's socket option and control message, which Python does not name: the time of what was received, on the wall.
_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("@ll")
_CONTROL_BYTES = socket.CMSG_SPACE(_TIMESPEC.size)

# From the clock of this host's processes to the wall's.
_WALL_NS = time.time_ns() - time.monotonic_ns()


class Client:
    """One stream."""

    def __init__(self, host: str, port: int, request: bytes) -> None:
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.SOL_SOCKET, _TIMESTAMPNS, 1)
        self.socket.sendall(request)
        self.socket.setblocking(False)
        self.heard: list[int] = []
        self.bytes = 0
        self._tail = b""

    def read(self) -> bool:
        """Read the available data; False at the end. Raises RuntimeError if the stream breaks or is refused."""
        chunk, control, _, _ = self.socket.recvmsg(262144, _CONTROL_BYTES)
        if not chunk or not control:
            raise RuntimeError("the stream broke")
        seconds, nanoseconds = _TIMESPEC.unpack(control[0][2])
        self.bytes += len(chunk)
        data = self._tail + chunk
        if not self.heard and data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(data[:300].decode())
        self.heard += [seconds * 1_000_000_000 + nanoseconds - _WALL_NS] * data.count(_EVENT)
        cut = max(data.rfind(_EVENT) + len(_EVENT), len(data) - len(_DONE) - 16, 0)
        self._tail = data[cut:]
        return _DONE not in data


def request_of(path: str, name: str, tokens: int, **more: object) -> bytes:
    """Return a request as bytes for a socket; `more` are further fields."""
    body: dict[str, object] = {"stream": True, "max_tokens": tokens, "ignore_eos": True, **more}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": "hello there"}]
    else:
        body["prompt"] = "hello there"
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\nX-Request-Id: {name}\r\n"
    return head.encode() + f"Content-Length: {len(raw)}\r\n\r\n".encode() + raw


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--path", default="/v1/completions")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--prefix", default="s")
    parser.add_argument("--heard", required=True)
    options = parser.parse_args()
    host, port = options.url.removeprefix("http://").split(":")
    selector = selectors.DefaultSelector()
    clients: dict[str, Client] = {}
    for i in range(options.streams):
        name = f"{options.prefix}-{i}"
        client = clients[name] = Client(host, int(port), request_of(options.path, name, options.tokens))
        selector.register(client.socket, selectors.EVENT_READ, client)
    open_streams = len(clients)
    while open_streams:
        ready = selector.select(30)
        if not ready:
            raise RuntimeError(f"{open_streams} streams say nothing more")
        for key, _ in ready:
            if not key.data.read():
                selector.unregister(key.fileobj)
                open_streams -= 1
    Path(options.heard).write_text(json.dumps({name: client.heard for name, client in clients.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
