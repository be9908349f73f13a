"""Writes typed errors, and the headers with the request id, in the form of the client's API: Anthropic's on its routes,
OpenAI's on all others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire_common.errors import QuireError

ANTHROPIC_PREFIX = "/v1/messages"
_OVERLOADED = 529
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_text(error: QuireError) -> str:
    """Return the error's cause and fix as one text."""
    return f"{error.message} {error.fix}" if error.fix else error.message


def error_object(error: QuireError) -> dict[str, Any]:
    """Convert an error to OpenAI's object, with Quire's stable code as `code`."""
    told = {"message": error_text(error), "type": error.kind, "param": error.param or None, "code": error.code}
    return {"error": told}


def anthropic_error(error: QuireError, request_id: str) -> dict[str, Any]:
    """Convert an error to Anthropic's object, with the request id. The HTTP status decides the type, `api_error` for
    any other status. Quire's code and parameter are additional fields."""
    kind = _ANTHROPIC_TYPES.get(error.http_status, "api_error")
    told = {"type": kind, "message": error_text(error), "code": error.code, "param": error.param or None}
    return {"type": "error", "error": told, "request_id": request_id}


def shaped_error(path: str, error: QuireError, request_id: str) -> tuple[int, dict[str, Any]]:
    """Return the status and body of an error at this path. Anthropic's paths have Anthropic's form, with 529 in place
    of 503; other paths have OpenAI's form."""
    if _is_anthropic(path):
        status = _OVERLOADED if error.http_status == 503 else error.http_status
        return status, anthropic_error(error, request_id)
    return error.http_status, error_object(error)


def id_headers(path: str) -> tuple[bytes, ...]:
    """Return the names of the headers that carry the request id in an answer at this path."""
    return (b"x-request-id", b"request-id") if _is_anthropic(path) else (b"x-request-id",)


def _is_anthropic(path: str) -> bool:
    return path == ANTHROPIC_PREFIX or path.startswith(f"{ANTHROPIC_PREFIX}/")
