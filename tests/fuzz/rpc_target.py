"""A target that calls a service's RPCs over a real connection, with bytes that need not be messages.

An input is the number of a method, then messages, each behind its length. A call of one request sends the first.
"""

from __future__ import annotations

import asyncio
import random
import struct
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from quire_common.errors import from_rpc_error
from tests.fuzz.changes.message_changes import changed_message
from tests.fuzz.target import Finding, Outcome, Target

if TYPE_CHECKING:
    from pathlib import Path

_LENGTH = struct.Struct("<H")
_MOST_MESSAGES = 12
_MOST_ANSWERS = 200
# Stand for a lease that the service has just given; of the length that it has, so that messages stay whole.
PLACEHOLDER = b"$known-lease-$$$"
_KNOWN = 32
T = TypeVar("T")


@dataclass(frozen=True)
class Method:
    """`lasts`: the call goes on until the client ends it. `seeds`: calls that are right, each a list of messages."""

    path: str
    request: type[Message]
    answer: type[Message]
    seeds: tuple[tuple[Message, ...], ...]
    streams_in: bool = False
    streams_out: bool = False
    lasts: bool = False


class RpcTarget(Target):
    """Each input is one call."""

    call_s = 30.0
    lasting_s = 0.05

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.methods = self.make_methods()
        self._known: deque[bytes] = deque([b"\1" * 16], maxlen=_KNOWN)
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        self._channel = self.closing.enter_context(grpc.insecure_channel(self.serve(), options=options))

    @abstractmethod
    def make_methods(self) -> tuple[Method, ...]:
        """All methods that are to be called."""

    @abstractmethod
    def serve(self) -> str:
        """Start the service, to end with `closing`; return its address."""

    def settle(self) -> None:
        """Check the service after an input."""

    def prepare(self, method: Method, message: bytes) -> bytes:
        """Return the message as it is to be sent: with what only the service knows."""
        if PLACEHOLDER in message:
            return message.replace(PLACEHOLDER, self._known[-1])
        return message

    def seeds(self) -> list[bytes]:
        return [
            packed(number, [message.SerializeToString() for message in call])
            for number, method in enumerate(self.methods)
            for call in method.seeds
        ]

    def mutate(self, data: bytes, choose: random.Random) -> bytes:
        number, messages = unpacked(data)
        method = self.methods[number % len(self.methods)]
        if not messages:
            messages = [b""]
        at = choose.randrange(len(messages))
        if method.streams_in and choose.random() < 0.3:
            match choose.randrange(3):
                case 0:
                    messages.insert(at, messages[at])
                case 1:
                    del messages[at]
                case _:
                    choose.shuffle(messages)
        else:
            messages[at] = changed_message(messages[at], method.request, choose, (PLACEHOLDER,))
        return packed(number, messages[:_MOST_MESSAGES])

    def run(self, data: bytes) -> Outcome:
        number, messages = unpacked(data)
        method = self.methods[number % len(self.methods)]
        sent = [self.prepare(method, message) for message in messages] or [b""]
        sent = sent if method.streams_in else sent[:1]
        readable = all(_reads(method.request, message) for message in sent)
        code = self._call(method, sent)
        self.settle()
        if not readable:
            return Outcome.UNREADABLE
        return Outcome.ACCEPTED if code is grpc.StatusCode.OK else Outcome.REFUSED

    def _call(self, method: Method, sent: list[bytes]) -> grpc.StatusCode:
        timeout = self.lasting_s if method.lasts else self.call_s
        kind = f"{'stream' if method.streams_in else 'unary'}_{'stream' if method.streams_out else 'unary'}"
        call: Any = getattr(self._channel, kind)(method.path)
        request = iter(sent) if method.streams_in else sent[0]
        started = time.monotonic()
        try:
            answered = call(request, timeout=timeout)
            for count, answer in enumerate(answered if method.streams_out else [answered]):
                self._learn(method.answer.FromString(answer))
                if count >= _MOST_ANSWERS:
                    answered.cancel()
                    break
        except grpc.RpcError as error:
            return self._ended(method, error, time.monotonic() - started)
        return grpc.StatusCode.OK

    def _ended(self, method: Method, error: Any, seconds: float) -> grpc.StatusCode:
        code: grpc.StatusCode = error.code()
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            if method.lasts:
                return grpc.StatusCode.OK
            if seconds >= 0.9 * self.call_s:  # sooner, the deadline is one that the request names
                raise Finding(f"{method.path} did not end within {self.call_s:g} s")
        if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
            raise Finding(f"{method.path}: {code.name} {error.details()}")
        told = from_rpc_error(error)
        if not told.code or not told.fix or told.code == "PEER_DEADLINE_EXCEEDED":
            raise Finding(f"{method.path}: {code.name} without a cause and a fix: {error.details()}")
        return code

    def _learn(self, answer: Any) -> None:
        """Keep leases that the service names."""
        lease = getattr(answer, "lease", b"")
        if isinstance(lease, bytes) and len(lease) == len(PLACEHOLDER):
            self._known.append(lease)


class LoopThread:
    """An event loop in a thread of its own, for services that need one. A context."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._held = AsyncExitStack()

    def __enter__(self) -> LoopThread:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.run(self._held.aclose())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await it there, and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def enter(self, context: AbstractAsyncContextManager[T]) -> T:
        """Enter the context there, and leave it before the loop ends."""
        return self.run(self._held.enter_async_context(context))


def unary(service: str, method: str, request: Message, answer: type[Message]) -> Method:
    """A method of one request and one answer."""
    return Method(f"/quire.v1.{service}/{method}", type(request), answer, ((request,),))


def packed(number: int, messages: list[bytes]) -> bytes:
    """An input."""
    return bytes([number]) + b"".join(_LENGTH.pack(len(m[:65535])) + m[:65535] for m in messages)


def unpacked(data: bytes) -> tuple[int, list[bytes]]:
    """The number and the messages of an input; what is cut short counts as far as it goes."""
    number, at, messages = data[0] if data else 0, 1, []
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        messages.append(data[at : at + length])
        at += length
    return number, messages


def _reads(kind: type[Message], data: bytes) -> bool:
    try:
        kind.FromString(data)
    except DecodeError:
        return False
    return True
