"""The format of /inference/v1/generate: token ids, as vLLM writes them; a stream has chunks of the same form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from quire_router.front.http.formats.answer_format import DONE, FrameParts, finish_name, id_list, usage_object
from quire_router.front.http.formats.large_json import dumps_in_pieces
from quire_router.front.http.formats.logprob_format import TokenNames, chat_logprobs, prompt_logprobs
from quire_router.front.http.parsing.kv_transfer_fields import kv_transfer_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.errors import QuireError
    from quire_router.front.http.parsing.parse import ParsedRequest
    from quire_router.requests.generation import Generation
    from quire_router.sequences.delta import Delta


class TokenFormat:
    """Implements AnswerFormat."""

    def __init__(self, generation: Generation, parsed: ParsedRequest) -> None:
        self._generation = generation
        self._parsed = parsed
        self._logprobs = parsed.job.sampling.logprobs >= 0 and parsed.job.wants.logprobs
        self._names = TokenNames(generation.token_bytes, by_id=parsed.job.wants.tokens_by_id)
        self._id = generation.caller.request_id

    def opening(self) -> bytes:
        """Return nothing: the first chunk has the first tokens."""
        return b""

    def frame(self, delta: Delta) -> bytes:
        """Return a chunk with the delta's tokens, also of tokens whose text is held back; nothing if there is neither a
        new token nor an end."""
        return (
            _event({"request_id": self._id, "choices": [self._choice(delta)]}) if delta.tokens or delta.finish else b""
        )

    def closing(self) -> bytes:
        """Return a chunk with the usage, if asked for, and `[DONE]`."""
        if not self._parsed.include_usage:
            return DONE
        usage = usage_object(self._generation.usage())
        return _event({"request_id": self._id, "choices": [], "usage": usage}) + DONE

    def failed(self, error: QuireError) -> bytes:
        """Return the error as an event, and `[DONE]`."""
        return FrameParts.failed(error)

    async def settle(self) -> None:
        """Do nothing: these answers are not kept."""

    def document(self, deltas: Sequence[Delta]) -> bytes:
        """Return the whole answer as JSON, as vLLM writes it: all choices, usage, KV transfer parameters and prompt
        logprobs. The last two are null unless asked for. A large answer is written in pieces."""
        scored = self._parsed.job.wants.prompt_logprobs
        entries = self._generation.prompt_entries(0) if scored >= 0 else []
        answer: dict[str, Any] = {
            "request_id": self._id,
            "choices": [self._choice(delta) for delta in deltas],
            "prompt_logprobs": prompt_logprobs(entries, scored, self._generation.token_bytes) if entries else None,
            "kv_transfer_params": kv_transfer_object(self._generation.kv_offer),
            "usage": usage_object(self._generation.usage()),
        }
        return dumps_in_pieces(answer) if self._generation.is_large else orjson.dumps(answer)

    def _choice(self, delta: Delta) -> dict[str, Any]:
        """Build the choice of a delta: its token ids, logprobs if asked for, and finish reason."""
        return {
            "index": delta.index,
            "token_ids": id_list(delta.token_ids),
            "logprobs": chat_logprobs(delta.entries, self._names) if self._logprobs else None,
            "finish_reason": finish_name(delta.finish),
        }


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"
