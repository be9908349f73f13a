"""The format of /v1/completions: `text_completion` objects, whole or as chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from quire_router.front.http.formats.answer_format import FrameParts, finish_name, id_list, usage_object
from quire_router.front.http.formats.logprob_format import (
    TokenNames,
    completion_logprobs,
    echoed_logprobs,
    prompt_logprobs,
)
from quire_router.front.http.parsing.kv_transfer_fields import kv_transfer_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.errors import QuireError
    from quire_router.front.http.parsing.parse import ParsedRequest
    from quire_router.requests.generation import Generation
    from quire_router.sequences.delta import Delta


class CompletionFormat:
    """Implements AnswerFormat."""

    def __init__(self, generation: Generation, parsed: ParsedRequest) -> None:
        self._parts = FrameParts(generation, parsed, f"cmpl-{generation.caller.request_id}", "text_completion")
        self._generation = generation
        self._wants = parsed.job.wants
        self._names = TokenNames(generation.token_bytes, by_id=self._wants.tokens_by_id)
        self._logprobs = parsed.job.sampling.logprobs >= 0 and parsed.job.wants.logprobs
        self._plain = not (self._logprobs or self._wants.echo or parsed.continuous_usage)
        self._heads = [
            self._parts.prefix + b',"choices":[{"index":%d,"text":' % i for i in range(generation.answer_count)
        ]
        self._middle = b',"logprobs":null,"finish_reason":null,"stop_reason":null'
        self._tail = b"}]" + self._parts.usage_part(0) + b"}\n\n"
        self._characters = [0] * generation.answer_count
        self._opened = [False] * generation.answer_count

    def opening(self) -> bytes:
        """Return nothing: a completion's first chunk is its first text."""
        return b""

    def frame(self, delta: Delta) -> bytes:
        """Return the chunk of a delta. The chunk is joined from prepared bytes if the delta ends nothing, chunks have
        neither logprobs, echo nor usage, and no prompt ids are still to be sent; any other is built as a dict."""
        if self._plain and not delta.finish and (self._opened[delta.index] or not self._wants.token_ids):
            ids = self._parts.ids_part(delta)
            return self._heads[delta.index] + orjson.dumps(delta.text) + self._middle + ids + self._tail
        choice = self._choice(delta)
        text = choice.pop("text")
        rest = orjson.dumps({key: value for key, value in choice.items() if key != "index"})
        head = self._heads[delta.index] + orjson.dumps(text) + b"," + rest[1:]
        return head + b"]" + self._parts.usage_part(delta.index) + b"}\n\n"

    def closing(self) -> bytes:
        """Return usage and timings, as asked for, and `[DONE]`."""
        return self._parts.closing()

    def failed(self, error: QuireError) -> bytes:
        """Return the error as an event, and `[DONE]`."""
        return self._parts.failed(error)

    async def settle(self) -> None:
        """Do nothing: completions are not kept."""

    def document(self, deltas: Sequence[Delta]) -> bytes:
        """Return the whole answer as JSON: all choices and usage and, as asked for, KV transfer parameters and
        timings."""
        answer: dict[str, Any] = {**self._parts.fields, "choices": [self._choice(delta) for delta in deltas]}
        answer["usage"] = usage_object(self._generation.usage())
        if self._generation.job.kv_export:
            answer["kv_transfer_params"] = kv_transfer_object(self._generation.kv_offer)
        return self._parts.written(self._parts.with_timings(answer))

    def _choice(self, delta: Delta) -> dict[str, Any]:
        """Build the choice of a delta: text, finish and stop reason (null while it runs) and, if asked for, logprobs
        and token ids. With logprobs, advance the choice's offset in characters. If asked for, the first delta of a
        choice has the echoed prompt, with logprobs if the answer has them, and the prompt's ids. The last delta has the
        prompt's logprobs, if asked for."""
        index, text, logprobs = delta.index, delta.text, None
        first, self._opened[index] = not self._opened[index], True
        if self._logprobs:
            logprobs = completion_logprobs(delta, self._names, self._characters[index])
            self._characters[index] = delta.offsets[-1] if delta.offsets else self._characters[index]
        if self._wants.echo and first:
            prompt = self._generation.prompt_texts[index // self._generation.job.n]
            text = prompt + text
            if logprobs is not None:
                echoed = echoed_logprobs(
                    prompt,
                    self._parts.prompt_ids(index),
                    self._generation.prompt_entries(index),
                    self._generation.job.sampling.logprobs,
                    self._names,
                )
                logprobs["text_offset"] = [len(prompt) + offset for offset in logprobs["text_offset"]]
                logprobs = {name: values + logprobs[name] for name, values in echoed.items()}
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_name(delta.finish),
            "stop_reason": delta.stop_reason,
        }
        if delta.finish and self._wants.prompt_logprobs >= 0:
            entries = self._generation.prompt_entries(index)
            choice["prompt_logprobs"] = prompt_logprobs(
                entries, self._wants.prompt_logprobs, self._generation.token_bytes
            )
        if self._wants.token_ids:
            choice["token_ids"] = id_list(delta.token_ids)
            if first:
                choice["prompt_token_ids"] = self._parts.prompt_ids(index)
        return choice
