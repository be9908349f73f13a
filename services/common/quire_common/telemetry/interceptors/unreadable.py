"""Requests whose bytes are no message of their type (broken UTF-8, cut fields): a typed error, not gRPC's UNKNOWN.

A deserialiser fails before any handler runs, so interceptors do not see its error. So a deserialiser here returns an
`Unreadable` instead, and the wrapped handler raises the typed error; in a stream, when the handler reads this request.
A request that comes too slowly or not at all is a typed error too, if the server bounds the time (`reading`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from quire_common.errors import DeadlineExceeded, InvalidArgument

Read = Callable[[AsyncIterator[Any]], Awaitable[Any]]


class Unreadable:
    """Stands in for a request that could not be read."""


def tolerant(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Return the deserializer, changed so that it returns `Unreadable` where it would raise. None stays None."""
    if deserializer is None:
        return None

    def read(data: bytes) -> Any:
        """Deserialize a request; `Unreadable` if that raises."""
        try:
            return deserializer(data)
        except Exception:  # protobuf's DecodeError, or whatever a custom deserialiser raises
            return Unreadable()

    return read


def require_readable(request: Any) -> None:
    """Raise InvalidArgument where the request is an `Unreadable`."""
    if isinstance(request, Unreadable):
        raise InvalidArgument(
            "UNREADABLE_MESSAGE",
            "The request's bytes are not a message of this method: a string is not UTF-8, or a field is cut short.",
            "Encode text as UTF-8, and build the message from the published contract.",
        )


class ReadableStream:
    """A request stream, for asyncio or for threads, that raises InvalidArgument at an `Unreadable`."""

    __slots__ = ("_requests",)

    def __init__(self, requests: Any) -> None:
        self._requests = requests

    def __aiter__(self) -> ReadableStream:
        return self

    async def __anext__(self) -> Any:
        request = await anext(self._requests)
        require_readable(request)
        return request

    def __iter__(self) -> ReadableStream:
        return self

    def __next__(self) -> Any:
        request = next(self._requests)
        require_readable(request)
        return request


def reading(timeout_s: float | None) -> Read:
    """Return a function that takes the single request of a call from its stream. It raises DeadlineExceeded after
    `timeout_s` (None: never), and InvalidArgument if the client sends no request."""

    async def read(requests: AsyncIterator[Any]) -> Any:
        """Return the single request of the stream. Raises DeadlineExceeded after `timeout_s`, InvalidArgument if there
        is none."""
        try:
            async with asyncio.timeout(timeout_s):
                return await anext(requests)
        except TimeoutError:
            raise DeadlineExceeded(
                "MESSAGE_TIMEOUT", f"The request did not arrive within {timeout_s:g} s.", "Send it faster."
            ) from None
        except StopAsyncIteration:
            raise _no_message() from None

    return read


def read_one(requests: Iterator[Any]) -> Any:
    """Return the one request of a call from the stream that it comes by; blocks until it is there. Raises
    InvalidArgument if the client sends none."""
    try:
        return next(requests)
    except StopIteration:
        raise _no_message() from None


def _no_message() -> InvalidArgument:
    return InvalidArgument("NO_MESSAGE", "The call has no message.", "Send one request.")
