"""The sockets of vLLM's event wire: PUB sends each batch, ROUTER answers requests for missed ones.

    PUB                [topic, number (8 bytes, big-endian), payload]
    ROUTER, asked      [identity, b"", first number (8 bytes, big-endian)]
    ROUTER, answers    [identity, b"", number, payload] for each batch it still has, then [identity, b"", -1, b""]

A thread of its own owns both sockets, and batches reach it through a bounded pipe. The thread waits for no consumer:
ZeroMQ drops batches for a consumer that is too slow, which sees the gap in the numbers.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from typing import TYPE_CHECKING

import zmq

from quire_common.errors import ConfigError
from quire_common.telemetry.logs import get_logger

if TYPE_CHECKING:
    from quire_scheduler.service.kv_events.events_config import KvEventsConfig

log = get_logger(__name__)
_END = (-1).to_bytes(8, "big", signed=True)
_LINGER_MS = 500
_LEAST_REPLAY = 1000
_pipes = itertools.count()


class ZmqPublisher:
    """Publishes batches of events over ZeroMQ. Making one raises ConfigError if an endpoint cannot be used. `endpoint`
    and `replay_endpoint` are the endpoints that are really used; the latter is empty if there is none."""

    def __init__(self, config: KvEventsConfig) -> None:
        self._topic = config.topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self.endpoint = _open(self._pub, config.endpoint, bind=config.binds)
            self.replay_endpoint = ""
            if config.replay_endpoint is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                # An answer may have as many batches as are kept. ZeroMQ drops messages to a consumer that asks again
                # and again and reads nothing.
                self._replay.set_hwm(max(4 * config.buffer_steps, _LEAST_REPLAY))
                self.replay_endpoint = _open(self._replay, config.replay_endpoint, bind=True)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        pipe = f"inproc://kv-events-{next(_pipes)}"
        self._source, self._sink = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        # An empty message ends the thread.
        self._sink.set_hwm(config.max_queue_size)
        self._source.set_hwm(1)
        self._sink.bind(pipe)
        self._source.connect(pipe)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, payload: bytes) -> bool:
        """Hand a batch to the thread that sends it. Returns False, and does not take the batch, if the pipe is full."""
        try:
            self._source.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Send the batches that were handed over, end the thread, and close the sockets. Messages that consumers have
        not taken within 0.5 s are dropped."""
        self._source.send(b"")
        self._thread.join()
        self._context.destroy(linger=_LINGER_MS)

    def _run(self) -> None:
        """Publish and keep the batches from the pipe, and answer requests for missed ones, until an empty message
        comes. Runs in the publisher's thread."""
        poller = zmq.Poller()
        poller.register(self._sink, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        number = 0
        while True:
            ready = dict(poller.poll())
            if self._sink in ready:
                payload = self._sink.recv()
                if not payload:
                    return
                self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
                self._kept.append((number, payload))
                number += 1
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Read one request for missed batches. Send the kept batches from the requested number on, then an end mark. A
        malformed request is logged and dropped."""
        asked = replay.recv_multipart()
        if len(asked) != 3 or len(asked[2]) != 8:
            log.warning("a request for missed KV events is malformed", frames=len(asked))
            return
        client, _, first = asked
        start = int.from_bytes(first, "big")
        for number, payload in self._kept:
            if number >= start:
                replay.send_multipart((client, b"", number.to_bytes(8, "big"), payload))
        replay.send_multipart((client, b"", _END, b""))


def _open(socket: zmq.Socket[bytes], endpoint: str, *, bind: bool) -> str:
    """Bind the socket or connect it, and return the endpoint that is really used. Raises ConfigError if ZeroMQ cannot
    use the endpoint, such as one whose port is in use."""
    try:
        if bind:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        in_use = error.errno == zmq.EADDRINUSE
        raise ConfigError(
            "PORT_IN_USE" if in_use else "BAD_VALUE",
            f"KV events cannot {'bind' if bind else 'connect to'} {endpoint}: {error}.",
            "Choose another endpoint in --kv-events-config; each replica of a machine needs its own.",
            param="kv_events_config",
        ) from None
    return socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
