"""How a generation is written: the Protocol, and what completions and chat share. Frames are bytes, not dicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import orjson

from quire_common.columns import i32
from quire_router.front.http.formats.error_shape import error_object
from quire_router.front.http.formats.large_json import dumps_in_pieces
from quire_router.sequences.delta import FINISH_NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.errors import QuireError
    from quire_router.front.http.parsing.parse import ParsedRequest
    from quire_router.requests.generation import Generation
    from quire_router.sequences.delta import Delta, Usage

DONE = b"data: [DONE]\n\n"


class AnswerFormat(Protocol):
    """One generation's answer; made once per request. Frames are whole server-sent events."""

    def opening(self) -> bytes:
        """Frames before the first delta."""

    def frame(self, delta: Delta) -> bytes:
        """A delta as a frame; empty where there is nothing to tell."""

    def closing(self) -> bytes:
        """All that follows the last delta, the stream's own mark of its end included."""

    def failed(self, error: QuireError) -> bytes:
        """The end of a stream that had begun and cannot go on."""

    async def settle(self) -> None:
        """Called when all is known, before the end of the answer is told: the place to keep it."""

    def document(self, deltas: Sequence[Delta]) -> bytes:
        """The whole answer as JSON: one delta per choice, in the order of their indices."""


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class FrameParts:
    """Pieces that completions and chat build alike."""

    def __init__(self, generation: Generation, parsed: ParsedRequest, answer_id: str, object_name: str) -> None:
        self.generation = generation
        self.parsed = parsed
        self.fields = {
            "id": answer_id,
            "object": object_name,
            "created": generation.created,
            "model": generation.served.name,
            "system_fingerprint": None,
        }
        # Everything before the choices, once: {"id":...,"system_fingerprint":null
        self.prefix = b"data: " + orjson.dumps(self.fields)[:-1]
        self._null_usage = b',"usage":null' if parsed.include_usage else b""

    def usage_part(self, index: int, *, opening: bool = False) -> bytes:
        """The usage member of a chunk: of its choice so far where asked for, null where only the last chunk has it.

        `opening`: the chunk comes before all tokens, though some may be there already.
        """
        if not self.parsed.continuous_usage:
            return self._null_usage
        choice = self.generation.sequences[index]
        prompt, output = len(choice.spec.prompt_ids), 0 if opening else choice.text.confirmed
        return b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (
            prompt,
            output,
            prompt + output,
        )

    def ids_part(self, delta: Delta) -> bytes:
        """The token_ids member of a choice, where it was asked for."""
        if not self.parsed.job.wants.token_ids:
            return b""
        return b',"token_ids":' + orjson.dumps(id_list(delta.token_ids))

    def closing(self) -> bytes:
        """The chunk without choices that carries usage and timings, where either was asked for, and `[DONE]`."""
        if not self.parsed.include_usage and not self.parsed.job.wants.timings:
            return DONE
        chunk: dict[str, Any] = {**self.fields, "choices": []}
        if self.parsed.include_usage:
            chunk["usage"] = usage_object(self.generation.usage())
        return b"data: " + orjson.dumps(self.with_timings(chunk)) + b"\n\n" + DONE

    @staticmethod
    def failed(error: QuireError) -> bytes:
        """The error as an event, and `[DONE]`."""
        return b"data: " + orjson.dumps(error_object(error)) + b"\n\n" + DONE

    def with_timings(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Add `quire_timings` where they were asked for."""
        if self.parsed.job.wants.timings:
            answer["quire_timings"] = [
                {"service": t.service, "phase": t.phase, "us": t.us, "count": t.count, "instance": t.instance}
                for t in self.generation.timings()
            ]
        return answer

    def written(self, answer: dict[str, Any]) -> bytes:
        """A whole answer as JSON."""
        return dumps_in_pieces(answer) if self.generation.is_large else orjson.dumps(answer)

    def prompt_ids(self, index: int) -> list[int]:
        """The prompt of a choice, for return_token_ids."""
        ids: list[int] = self.generation.prompt_ids(index).tolist()
        return ids


def finish_name(finish: int) -> str | None:
    """OpenAI's name of a FinishReason; None while running."""
    return FINISH_NAMES.get(finish) if finish else None


def id_list(token_ids: bytes) -> list[int]:
    """An int32 column as JSON wants it."""
    ids: list[int] = i32(token_ids, "token_ids").tolist()
    return ids
