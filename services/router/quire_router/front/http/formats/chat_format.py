"""The format of /v1/chat/completions: `chat.completion` objects, or `chat.completion.chunk` objects, the first of which
has the role."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from quire_router.front.http.formats.answer_format import FrameParts, finish_name, id_list, usage_object
from quire_router.front.http.formats.logprob_format import TokenNames, chat_logprobs, prompt_logprobs
from quire_router.front.http.formats.message_parts import MessageParts
from quire_router.front.http.parsing.kv_transfer_fields import kv_transfer_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.errors import QuireError
    from quire_router.front.http.parsing.parse import ParsedRequest
    from quire_router.requests.generation import Generation
    from quire_router.sequences.delta import Delta


class ChatFormat:
    """Implements AnswerFormat."""

    def __init__(self, generation: Generation, parsed: ParsedRequest) -> None:
        name = "chat.completion.chunk" if parsed.stream else "chat.completion"
        self._parts = FrameParts(generation, parsed, f"chatcmpl-{generation.caller.request_id}", name)
        self._generation = generation
        self._wants = parsed.job.wants
        self._message = MessageParts(generation.caller.request_id, self._wants)
        self._names = TokenNames(generation.token_bytes, by_id=self._wants.tokens_by_id)
        self._logprobs = parsed.job.sampling.logprobs >= 0 and parsed.job.wants.logprobs
        self._plain = not (self._logprobs or parsed.continuous_usage)
        # Whether a token without text also has a chunk.
        self._tells_tokens = not self._plain or self._wants.token_ids
        self._heads = [
            self._parts.prefix + b',"choices":[{"index":%d,"delta":{"content":' % i
            for i in range(generation.answer_count)
        ]
        self._middle = b'},"logprobs":null,"finish_reason":null'
        self._tail = b"}]" + self._parts.usage_part(0) + b"}\n\n"

    def opening(self) -> bytes:
        """Return the first chunk of every choice. It has the role, an empty content and, if asked for, the prompt's
        ids."""
        frames = []
        for choice in self._generation.sequences:
            opened = {
                "index": choice.index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            frame = self._parts.prefix + b',"choices":[' + orjson.dumps(opened) + b"]"
            if self._wants.token_ids:
                frame += b',"prompt_token_ids":' + orjson.dumps(self._parts.prompt_ids(choice.index))
            frames.append(frame + self._parts.usage_part(choice.index, opening=True) + b"}\n\n")
        return b"".join(frames)

    def frame(self, delta: Delta) -> bytes:
        """Return the chunk of a delta. The chunk is joined from prepared bytes if the answer is not parsed, the delta
        ends nothing, and chunks have neither logprobs nor usage; any other is built as a dict. A delta with several
        parts becomes several chunks, except that pieces of one tool call are joined; the last chunk has the logprobs,
        token ids and finish reason. A parsed delta that shows nothing and ends nothing has no chunk, unless chunks have
        logprobs, token ids or usage."""
        if self._plain and not delta.finish and delta.parts is None:
            text, ids = orjson.dumps(delta.text), self._parts.ids_part(delta)
            return self._heads[delta.index] + text + self._middle + ids + self._tail
        *before, last = self._message.deltas(delta) or [
            {} if delta.finish or not self._tells_tokens else {"content": ""}
        ]
        if not last and not delta.finish:
            return b""
        open_end = {"logprobs": None, "finish_reason": None}
        return b"".join(
            [
                *(self._chunk(delta, {"index": delta.index, "delta": each, **open_end}) for each in before),
                self._chunk(delta, {"index": delta.index, "delta": last, **self._rest(delta)}),
            ]
        )

    def _chunk(self, delta: Delta, choice: dict[str, Any]) -> bytes:
        usage = self._parts.usage_part(delta.index)
        return self._parts.prefix + b',"choices":[' + orjson.dumps(choice) + b"]" + usage + b"}\n\n"

    def closing(self) -> bytes:
        """Return usage and timings, as asked for, and `[DONE]`."""
        return self._parts.closing()

    def failed(self, error: QuireError) -> bytes:
        """Return the error as an event, and `[DONE]`."""
        return self._parts.failed(error)

    async def settle(self) -> None:
        """Do nothing: chats are not kept."""

    def document(self, deltas: Sequence[Delta]) -> bytes:
        """Return the whole answer as JSON: all choices and usage and, as asked for, KV transfer parameters, prompt
        logprobs, prompt ids and timings."""
        choices = [
            {
                "index": delta.index,
                "message": {"role": "assistant", **self._message.message(delta)},
                **self._rest(delta),
            }
            for delta in deltas
        ]
        answer: dict[str, Any] = {**self._parts.fields, "choices": choices}
        answer["usage"] = usage_object(self._generation.usage())
        if self._generation.job.kv_export:
            answer["kv_transfer_params"] = kv_transfer_object(self._generation.kv_offer)
        if self._wants.prompt_logprobs >= 0:
            entries = self._generation.prompt_entries(0)
            answer["prompt_logprobs"] = prompt_logprobs(
                entries, self._wants.prompt_logprobs, self._generation.token_bytes
            )
        if self._wants.token_ids:
            answer["prompt_token_ids"] = self._parts.prompt_ids(0)
        return self._parts.written(self._parts.with_timings(answer))

    def _rest(self, delta: Delta) -> dict[str, Any]:
        """Return the fields of a choice that chunks and whole answers share: logprobs (null unless asked for), finish
        reason (null while the choice runs) and, if asked for, the delta's token ids. The end of the choice also has the
        stop reason."""
        rest: dict[str, Any] = {
            "logprobs": chat_logprobs(delta.entries, self._names) if self._logprobs else None,
            "finish_reason": self._message.finish(delta, finish_name(delta.finish)),
        }
        if delta.finish:
            rest["stop_reason"] = delta.stop_reason
        if self._wants.token_ids:
            rest["token_ids"] = id_list(delta.token_ids)
        return rest
