"""Channels whose TLS credentials follow their files. gRPC itself reads these files only once.

A call that has begun stays on its connection. On an asyncio channel, new calls use a channel with the newest
credentials once that channel is connected, or once the old channel no longer is. So while the old channel is connected,
no call waits for a handshake or fails because of it. On a blocking channel, the next call uses the new channel at once,
and waits for its handshake.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self

import grpc
from grpc import ChannelConnectivity

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_common.identity.watched_files import WatchedFiles

    MakeAioChannel = Callable[[grpc.ChannelCredentials], grpc.aio.Channel]
    MakeChannel = Callable[[grpc.ChannelCredentials], grpc.Channel]

# A stream may last as long as its process.
_FOREVER_S = 30 * 86_400.0
# No blocking call of ours lasts longer.
_LONGEST_CALL_S = 120.0


class _MethodMakers(ABC):
    """The methods of a channel from which stubs get their callables."""

    @abstractmethod
    def current(self) -> Any:
        """Return the channel for new calls."""

    def unary_unary(self, *method: Any, **options: Any) -> Any:
        return _Calls(self.current, "unary_unary", method, options)

    def unary_stream(self, *method: Any, **options: Any) -> Any:
        return _Calls(self.current, "unary_stream", method, options)

    def stream_unary(self, *method: Any, **options: Any) -> Any:
        return _Calls(self.current, "stream_unary", method, options)

    def stream_stream(self, *method: Any, **options: Any) -> Any:
        return _Calls(self.current, "stream_stream", method, options)


class WatchedAioChannel(_MethodMakers, grpc.aio.Channel):
    """Belongs to one event loop."""

    def __init__(self, credentials: WatchedFiles[grpc.ChannelCredentials], make: MakeAioChannel) -> None:
        self._credentials = credentials
        self._make = make
        self._generation = credentials.generation
        self._channel = make(credentials.value)
        self._next: grpc.aio.Channel | None = None
        self._retired: dict[asyncio.Task[None], grpc.aio.Channel] = {}
        self._closed = False

    def current(self) -> grpc.aio.Channel:
        """Return the channel for new calls. When the credentials have changed, a channel with the new ones is made and
        connects beside the old one. The new channel takes over at the first call of this method at which it is
        connected, or the old one no longer is. The old one is closed when its calls have ended, after 30 days at the
        latest, and so is a new one that became outdated before it took over. After `close`, no channel is made."""
        if self._generation != self._credentials.generation and not self._closed:
            self._generation = self._credentials.generation
            if self._next is not None:
                self._retire(self._next)
            self._next = self._make(self._credentials.value)
        if self._next is not None and (
            self._next.get_state(try_to_connect=True) is ChannelConnectivity.READY
            or self._channel.get_state() is not ChannelConnectivity.READY
        ):
            self._retire(self._channel)
            self._channel, self._next = self._next, None
        return self._channel

    def get_state(self, try_to_connect: bool = False) -> ChannelConnectivity:
        return self.current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: ChannelConnectivity) -> None:
        await self.current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.current().channel_ready()

    async def close(self, grace: float | None = None) -> None:
        """End all calls: those on former channels at once, those on the present one after `grace` seconds (None: at
        once)."""
        self._closed = True
        retired = dict(self._retired)
        for task in retired:
            task.cancel()
        await asyncio.gather(*retired, return_exceptions=True)
        for channel in retired.values():
            # Its task may have been cancelled before it began.
            await channel.close()
        if self._next is not None:
            await self._next.close()
        await self._channel.close(grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _retire(self, channel: grpc.aio.Channel) -> None:
        """Close a channel in the background when its calls have ended, after 30 days, or when this object is closed."""
        task = asyncio.ensure_future(channel.close(_FOREVER_S))
        self._retired[task] = channel
        task.add_done_callback(self._retired.pop)


class WatchedChannel(_MethodMakers, grpc.Channel):
    """For blocking calls with deadlines; safe to use from several threads."""

    def __init__(self, credentials: WatchedFiles[grpc.ChannelCredentials], make: MakeChannel) -> None:
        self._credentials = credentials
        self._make = make
        self._lock = threading.Lock()
        self._generation = credentials.generation
        self._channel = make(credentials.value)
        self._closing: dict[grpc.Channel, threading.Timer] = {}
        self._closed = False

    def current(self) -> grpc.Channel:
        """Return the channel for new calls: a new one as soon as the credentials have changed. The old one is closed
        120 s later, which would end calls that still run; no blocking call of ours lasts so long. After `close`, no
        channel is made."""
        if self._generation == self._credentials.generation:
            return self._channel
        with self._lock:
            if self._generation != self._credentials.generation and not self._closed:
                self._generation = self._credentials.generation
                timer = threading.Timer(_LONGEST_CALL_S, self._close_retired, (self._channel,))
                timer.daemon = True
                self._closing[self._channel] = timer
                timer.start()
                self._channel = self._make(self._credentials.value)
            return self._channel

    def subscribe(self, callback: Any, try_to_connect: bool = False) -> None:
        self.current().subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        self.current().unsubscribe(callback)

    def close(self) -> None:
        """End all calls, those on former channels too."""
        with self._lock:
            self._closed = True
            retired, self._closing = self._closing, {}
            self._channel.close()
        for channel, timer in retired.items():
            timer.cancel()
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _close_retired(self, channel: grpc.Channel) -> None:
        """Forget and close a former channel, when its time for running calls is over."""
        with self._lock:
            self._closing.pop(channel, None)
        channel.close()


class _Calls:
    """A method: each call goes to the channel of that moment."""

    def __init__(self, current: Callable[[], Any], kind: str, method: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._current = current
        self._kind = kind
        self._method = method
        self._options = options
        # A channel and the method there: calls of one channel share it.
        self._made: tuple[Any, Any] = (None, None)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._callable()(*args, **options)

    def with_call(self, *args: Any, **options: Any) -> Any:
        return self._callable().with_call(*args, **options)

    def future(self, *args: Any, **options: Any) -> Any:
        return self._callable().future(*args, **options)

    def _callable(self) -> Any:
        """Return the callable of this method on the channel for new calls. It is kept until that channel changes."""
        channel = self._current()
        made_for, call = self._made
        if made_for is not channel:
            call = getattr(channel, self._kind)(*self._method, **self._options)
            self._made = (channel, call)
        return call
