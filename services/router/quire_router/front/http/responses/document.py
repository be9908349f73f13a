"""The response object of the Responses API: the fields of the request, the output, and the status. It knows nothing of
streams or of storage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from quire_router.front.http.formats.error_shape import error_text
from quire_router.sequences.delta import LENGTH

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from quire_common.errors import QuireError
    from quire_router.sequences.delta import Usage

_ECHOED = (
    "instructions",
    "max_output_tokens",
    "metadata",
    "parallel_tool_calls",
    "previous_response_id",
    "prompt_cache_key",
    "safety_identifier",
    "temperature",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "truncation",
    "user",
)
# Replacements for echoed fields of the request that may be long.
_BRIEF: dict[str, Any] = {
    "instructions": None,
    "metadata": {},
    "text": {"format": {"type": "text"}},
    "tools": [],
    "tool_choice": "auto",
    "user": None,
}


class ResponseDocument:
    """One response. `store` says whether it is stored, which may differ from the client's `store`."""

    def __init__(
        self,
        response_id: str,
        echoed: Sequence[tuple[str, str]],
        model: str,
        created: int,
        *,
        background: bool,
        store: bool,
    ) -> None:
        """`echoed`: those of `echoed_fields`, as JSON."""
        self.id = response_id
        self._fixed: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": created,
            "model": model,
            "background": background,
            "store": store,
            "service_tier": "default",
            **{name: orjson.Fragment(text) for name, text in echoed},
        }

    def running(self, status: str = "in_progress") -> dict[str, Any]:
        """Return the response object before its end, without output."""
        return self._with(status, [], None)

    def ended(self, output: list[dict[str, Any]], finish: int, usage: Usage) -> dict[str, Any]:
        """Return the response object after its end; it is `incomplete` if the limit of tokens cut it."""
        cut = finish == LENGTH
        details = {"reason": "max_output_tokens"} if cut else None
        return self._with("incomplete" if cut else "completed", output, usage, incomplete_details=details)

    def brief(self, ended: dict[str, Any]) -> dict[str, Any]:
        """Return the ended response object without the echoed fields of the request that may be long."""
        return {**ended, **_BRIEF}

    def failed(self, error: QuireError) -> dict[str, Any]:
        """Return the response object of a generation that failed. Its error has the code `rate_limit_exceeded` for HTTP
        status 429, else `server_error`; the message begins with Quire's own code."""
        told = {"code": "rate_limit_exceeded" if error.http_status == 429 else "server_error"}
        return self._with("failed", [], None, error={**told, "message": f"{error.code}: {error_text(error)}"})

    def _with(
        self,
        status: str,
        output: list[dict[str, Any]],
        usage: Usage | None,
        *,
        error: dict[str, str] | None = None,
        incomplete_details: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Return the response object with this status, output, usage (None: null), error and details of an incomplete
        answer, in addition to the fields that never change."""
        ends = {"status": status, "error": error, "incomplete_details": incomplete_details}
        return {**self._fixed, **ends, "output": output, "usage": None if usage is None else _usage(usage)}


def echoed_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the response object that repeat the request's, from the checked fields of a body. A field
    that the request lacks has the API's default, or None."""
    return {
        **dict.fromkeys(_ECHOED),
        "reasoning": {"effort": (values["reasoning"] or {}).get("effort"), "summary": None},
        "text": {"format": (values["text"] or {}).get("format") or {"type": "text"}},
        "metadata": {},
        "tool_choice": "auto",
        "tools": [],
        "parallel_tool_calls": True,
        **{name: values[name] for name in _ECHOED if values.get(name) is not None},
    }


def _usage(usage: Usage) -> dict[str, Any]:
    """Convert a usage to the object of OpenAI's Responses API."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
