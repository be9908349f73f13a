"""Requests whose bytes are no message of their type (broken UTF-8, cut fields): a typed error, not gRPC's UNKNOWN.

A deserialiser fails before any handler runs, out of the interceptors' sight. So it is made to return a mark instead,
and the wrapped handler raises what the mark says. Unary requests only: streams are opened by our own services.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire_common.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable


class Unreadable:
    """Stands in for a request that could not be read."""


def tolerant(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """The deserialiser, but it returns `Unreadable` where it would raise."""
    if deserializer is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserializer(data)
        except Exception:  # protobuf's DecodeError, or whatever a custom deserialiser raises
            return Unreadable()

    return read


def require_readable(request: Any) -> None:
    """Raise InvalidArgument for the mark."""
    if isinstance(request, Unreadable):
        raise InvalidArgument(
            "UNREADABLE_MESSAGE",
            "The request's bytes are no message of this method: a string is not UTF-8, or a field is cut short.",
            "Encode text as UTF-8, and build the message from the published contract.",
        )
