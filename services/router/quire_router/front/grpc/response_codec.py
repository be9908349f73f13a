"""Converts deltas to quire.v1.GenerateResponse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.v1 import common_pb2 as pb
from quire.v1 import inference_pb2 as ib
from quire_common.columns import pack_i32
from quire_common.errors import to_message
from quire_router.front.grpc.tool_codec import add_parts

if TYPE_CHECKING:
    from quire_common.errors import QuireError
    from quire_router.requests.generation import Generation
    from quire_router.sequences.delta import Delta


class GenerateFormat:
    """Makes the responses of one generation. A request has one object, which must get each delta once, in order."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._request_id = generation.caller.request_id
        self._logprobs = generation.job.sampling.logprobs >= 0 and generation.job.wants.logprobs
        self._prompt_logprobs = generation.job.sampling.prompt_logprobs >= 0
        self._token_ids = generation.job.wants.token_ids
        self._first_sample, self._parallel = generation.job.first_sample, generation.job.wants.parallel_calls
        self._opened = False
        self._characters = [0] * generation.answer_count

    def delta(self, delta: Delta) -> ib.GenerateResponse:
        """Convert one delta of one choice to a response: text or parts, token ids, finish reason, the stop string or
        stop token. After an end by repetition detection, the stop string is vLLM's stop reason `repetition_detected`.
        Logprobs, prompt ids and prompt logprobs are there if asked for. The first response of all has the prompt's ids.
        The last response of a prompt's first choice has the prompt's logprobs."""
        response = ib.GenerateResponse(
            request_id=self._request_id,
            index=delta.index,
            text=delta.text,
            token_ids=delta.token_ids,
            finish_reason=delta.finish,  # type: ignore[arg-type]  # numbers of the same enum
        )
        if delta.parts is not None:
            add_parts(
                response, delta.parts, self._request_id, self._first_sample + delta.index, parallel=self._parallel
            )
        if self._token_ids and not self._opened:
            response.prompt_token_ids = pack_i32(self._generation.prompt_ids(0))
        self._opened = True
        if isinstance(delta.stop_reason, str):
            response.stop_string = delta.stop_reason
        elif delta.stop_reason is not None:
            response.stop_token_id = delta.stop_reason
        if self._logprobs:
            self._add_logprobs(response, delta)
        if delta.finish and self._prompt_logprobs and delta.index % self._generation.job.n == 0:
            self._add_prompt_logprobs(response, delta.index)
        return response

    def finish(self, last: ib.GenerateResponse) -> ib.GenerateResponse:
        """Add the usage, and timings if asked for, to the last response of all, and return it."""
        usage = self._generation.usage()
        last.usage.prompt_tokens = usage.prompt_tokens
        last.usage.completion_tokens = usage.completion_tokens
        last.usage.cached_tokens = usage.cached_tokens
        last.usage.reasoning_tokens = usage.reasoning_tokens
        if self._generation.job.wants.timings:
            for timing in self._generation.timings():
                last.timings.add(
                    service=timing.service,
                    phase=timing.phase,
                    us=timing.us,
                    count=timing.count,
                    instance=timing.instance,
                )
        return last

    def error(self, error: QuireError) -> ib.GenerateResponse:
        """Make the response that ends a stream with an error after the stream has begun."""
        return ib.GenerateResponse(
            request_id=self._request_id, finish_reason=pb.FINISH_REASON_ERROR, error=to_message(error)
        )

    def _add_prompt_logprobs(self, response: ib.GenerateResponse, index: int) -> None:
        """Add to `response` an entry for each prompt token but the first: id, bytes, logprob, rank and top
        alternatives. A token without logprobs from the engine gets an empty entry."""
        token_bytes = self._generation.token_bytes
        for entry in self._generation.prompt_entries(index)[1:]:
            added = response.prompt_logprobs.add()
            if entry is None:
                continue
            added.token_id, added.token = entry.token_id, token_bytes.get(entry.token_id)
            added.logprob, added.rank = entry.logprob, entry.rank
            for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
                added.top.add(token_id=token_id, token=token_bytes.get(token_id), logprob=logprob)

    def _add_logprobs(self, response: ib.GenerateResponse, delta: Delta) -> None:
        """Add an entry for each token of the delta to `response`: id, bytes, logprob, rank and top alternatives. Each
        entry also has the character offset in the choice at which its text begins. Advances the offset of the
        choice."""
        token_bytes = self._generation.token_bytes
        start = self._characters[delta.index]
        for entry, offset in zip(delta.entries, [start, *delta.offsets[:-1]], strict=False):
            added = response.logprobs.add(
                token_id=entry.token_id,
                token=token_bytes.get(entry.token_id),
                logprob=entry.logprob,
                rank=entry.rank,
                text_offset=offset,
            )
            for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
                added.top.add(token_id=token_id, token=token_bytes.get(token_id), logprob=logprob)
        if delta.offsets:
            self._characters[delta.index] = delta.offsets[-1]
