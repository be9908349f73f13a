"""AnswerFormat: the Protocol of answer formats, and the parts that completions and chat share. Formats make bytes, not
dicts."""

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
    """The answer of one generation. A request has one object. A frame is one or more whole server-sent events."""

    def opening(self) -> bytes:
        """Return the frames before the first delta."""

    def frame(self, delta: Delta) -> bytes:
        """Convert a delta to a frame; empty if the delta has nothing to show."""

    def closing(self) -> bytes:
        """Return the frames after the last delta, with the stream's end mark."""

    def failed(self, error: QuireError) -> bytes:
        """Return the end of a stream that had begun and has failed."""

    async def settle(self) -> None:
        """Store the answer, in formats that do so. The caller calls this after the last delta, before the client is
        sent the end."""

    def document(self, deltas: Sequence[Delta]) -> bytes:
        """Return the whole answer as JSON, from one delta per choice, in the order of the choices."""


def usage_object(usage: Usage) -> dict[str, Any]:
    """Convert a usage to OpenAI's object: prompt, completion, total and cached tokens, and reasoning tokens if there
    are any."""
    shown: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.reasoning_tokens:
        shown["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return shown


class FrameParts:
    """Parts of answers that completions and chat build in the same way."""

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
        """Return the member `usage` of a chunk, with a comma before it. With continuous usage, the member counts the
        choice's tokens that the tokenizer has confirmed by now. Without, the member is null if the last chunk of the
        stream has usage, and the result is empty otherwise. `opening`: the chunk comes before all tokens, so it counts
        none; a `prompt_only` job has none in any chunk."""
        if not self.parsed.continuous_usage:
            return self._null_usage
        choice = self.generation.sequences[index]
        counts_none = opening or self.generation.job.prompt_only
        prompt, output = len(choice.spec.prompt_ids), 0 if counts_none else choice.text.confirmed
        return b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % (
            prompt,
            output,
            prompt + output,
        )

    def ids_part(self, delta: Delta) -> bytes:
        """Return the token_ids member of a choice, with a comma before it; nothing if it was not asked for."""
        if not self.parsed.job.wants.token_ids:
            return b""
        return b',"token_ids":' + orjson.dumps(id_list(delta.token_ids))

    def closing(self) -> bytes:
        """Return the end of a stream: `[DONE]`, after a chunk without choices that has usage and timings, if either was
        asked for."""
        if not self.parsed.include_usage and not self.parsed.job.wants.timings:
            return DONE
        chunk: dict[str, Any] = {**self.fields, "choices": []}
        if self.parsed.include_usage:
            chunk["usage"] = usage_object(self.generation.usage())
        return b"data: " + orjson.dumps(self.with_timings(chunk)) + b"\n\n" + DONE

    @staticmethod
    def failed(error: QuireError) -> bytes:
        """Return the error as an event, and `[DONE]`."""
        return b"data: " + orjson.dumps(error_object(error)) + b"\n\n" + DONE

    def with_timings(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Add `quire_timings`, the durations by service and phase, and `quire_runs`, the last 16 replicas to which each
        choice was sent, if they were asked for. Returns `answer`."""
        if self.parsed.job.wants.timings:
            answer["quire_timings"] = [
                {"service": t.service, "phase": t.phase, "us": t.us, "count": t.count, "instance": t.instance}
                for t in self.generation.timings()
            ]
            answer["quire_runs"] = [
                {"index": sequence.index, "instance": run.instance, "from_token": run.from_token}
                for sequence in self.generation.sequences
                for run in sequence.placement.runs
            ]
        return answer

    def written(self, answer: dict[str, Any]) -> bytes:
        """Return the answer as JSON. A large answer is written in pieces."""
        return dumps_in_pieces(answer) if self.generation.is_large else orjson.dumps(answer)

    def prompt_ids(self, index: int) -> list[int]:
        """Return the prompt of a choice as a list, for return_token_ids."""
        ids: list[int] = self.generation.prompt_ids(index).tolist()
        return ids


def finish_name(finish: int) -> str | None:
    """Return OpenAI's name of a FinishReason; None while the choice runs."""
    return FINISH_NAMES.get(finish) if finish else None


def id_list(token_ids: bytes) -> list[int]:
    """Convert an int32 column to a list, as JSON needs it."""
    ids: list[int] = i32(token_ids, "token_ids").tolist()
    return ids
