"""Reads the body of a request within its bound, and decodes JSON objects. Errors name the cause, never the content."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import orjson

from quire_common.errors import Aborted, InvalidArgument, TooLarge
from quire_common.json_bounds import check_structure

if TYPE_CHECKING:
    from starlette.types import Receive, Scope

    from quire_router.front.http.body_budget import BodyLease

BODY_TOO_LARGE = "BODY_TOO_LARGE"
CLIENT_GONE = "CLIENT_GONE"
_READ_TIMEOUT_S = 60.0
# After a 413, so much more is read and thrown away, that a client which is still sending gets to see the answer.
_DISCARD_FACTOR = 4
_DISCARD_TIMEOUT_S = 5.0


async def read_json(scope: Scope, receive: Receive, limit: int, lease: BodyLease | None = None) -> bytes:
    """Read a body that will be parsed as a JSON object, without parsing it; `limit` and `lease` as in `read_body`.
    Raises the errors of `read_body`, and InvalidArgument for a Content-Type other than application/json. A request
    without Content-Type is taken as JSON."""
    # A browser page elsewhere can post forms and plain text to a local port, JSON it cannot.
    content_type = dict(scope["headers"]).get(b"content-type", b"application/json").split(b";")[0].strip().lower()
    if content_type != b"application/json":
        raise InvalidArgument(
            "BAD_CONTENT_TYPE",
            "The body's Content-Type is not application/json.",
            "Send the header Content-Type: application/json.",
        )
    return await read_body(scope, receive, limit, lease)


async def read_body(scope: Scope, receive: Receive, limit: int, lease: BodyLease | None = None) -> bytes:
    """Read the whole body. `lease` holds the body's bytes as they arrive; None: the body is so small that its bytes
    need no lease. Raises TooLarge as soon as the Content-Length or the bytes that have come exceed `limit`, Unavailable
    if the lease gets no memory, InvalidArgument after 60 s, and Aborted if the client leaves. After an error, the lease
    holds nothing."""
    for name, value in scope["headers"]:
        # int() refuses thousands of digits: leading zeros do not count, and 20 others are too many already.
        if name == b"content-length" and value.isdigit() and int(value.lstrip(b"0")[:20] or b"0") > limit:
            raise _too_large(limit)
    # A block of its own goes back to the kernel; freed chunks would stay in the heap, in pieces.
    body = bytearray()
    try:
        async with asyncio.timeout(_READ_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise client_gone()
                chunk = message.get("body", b"")
                if len(body) + len(chunk) > limit:
                    raise _too_large(limit)
                if lease is not None:
                    lease.grow(len(chunk))
                body += chunk
                if not message.get("more_body", False):
                    return bytes(body)
    except BaseException as error:
        body.clear()  # the error keeps this frame until the client has its answer
        if lease is not None:
            lease.release()
        if isinstance(error, TimeoutError):
            raise InvalidArgument(
                "BODY_TIMEOUT", f"The body did not arrive within {_READ_TIMEOUT_S:g} s.", "Send it faster."
            ) from None
        raise


async def discard_body(receive: Receive, limit: int) -> None:
    """Read the rest of a body and discard it, until 4 times `limit` bytes have come or 5 s have passed. Ends earlier if
    the client leaves."""
    left = _DISCARD_FACTOR * limit
    try:
        async with asyncio.timeout(_DISCARD_TIMEOUT_S):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse the body as a JSON object. Raises InvalidArgument for anything else, and for more values than any request
    needs; MemoryError if memory runs out. NaN and Infinity are accepted, so that the check of fields can name the field
    that has them."""
    check_structure(body)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        value = _parse_lenient(body, error)
    if not isinstance(value, dict):
        raise InvalidArgument("NOT_AN_OBJECT", "The body is JSON, but not an object.", "Send a JSON object.")
    return value


def client_gone() -> Aborted:
    """Make the error of a request whose client has closed the connection."""
    return Aborted("CLIENT_GONE", "The client closed the connection.", "Keep it open to get the answer.")


def _parse_lenient(body: bytes, error: orjson.JSONDecodeError) -> Any:
    """Parse a body that orjson has refused with `error`. NaN and Infinity are accepted. Any other fault raises
    InvalidArgument. It names the wrong byte of a body that is not UTF-8, else the place that orjson refused first,
    which may be a NaN before the fault. Raises MemoryError if memory ran out in orjson."""
    if error.msg.startswith("Not enough memory"):
        raise MemoryError from error
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as broken:
        raise InvalidArgument(
            "INVALID_UTF8", f"The body is not UTF-8: byte {broken.start} is wrong.", "Send JSON as UTF-8."
        ) from None
    if "NaN" in text or "Infinity" in text:
        try:
            value = json.loads(text)
            orjson.dumps(value)  # refuses lone surrogates, which no protobuf string can hold
        except (ValueError, TypeError, RecursionError):
            pass
        else:
            return value
    raise InvalidArgument(
        "INVALID_JSON",
        f"The body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}.",
        "Send a JSON object; numbers cannot be NaN or Infinity.",
    ) from None


def _too_large(limit: int) -> TooLarge:
    """Make the error of a body that is longer than `limit` bytes."""
    return TooLarge(
        BODY_TOO_LARGE,
        f"The body is longer than {limit} bytes.",
        "Send less at once, or raise --max-body-bytes.",
    )
