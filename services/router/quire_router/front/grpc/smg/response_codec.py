"""Converts deltas to vllm.grpc.engine's GenerateResponse: chunks while a choice runs, and one `complete` when it has
ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smg_grpc_proto.generated import vllm_engine_pb2 as vb

from quire_common.columns import i32
from quire_router.sequences.delta import FINISH_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from quire_router.requests.generation import Generation
    from quire_router.sequences.delta import Delta, LogprobEntry
    from quire_router.sequences.sequence_state import SequenceState


class SmgFormat:
    """Makes the responses of one generation."""

    def __init__(self, generation: Generation, *, stream: bool) -> None:
        self._generation = generation
        self._stream = stream
        # Tokens that the caller was told of: a choice may be further on by the time it is.
        self._completion_tokens = [0] * len(generation.sequences)
        self._logprobs = generation.job.sampling.logprobs >= 0
        self._prompt_logprobs = generation.job.sampling.prompt_logprobs >= 0

    def responses(self, delta: Delta) -> Iterator[vb.GenerateResponse]:
        """Yield the responses for one delta. A streamed request gets a chunk if there are new tokens; a choice that has
        ended gets `complete`, also in a stream. Adds the delta's tokens to the choice's count, which chunks report."""
        sequence = self._generation.sequences[delta.index]
        self._completion_tokens[delta.index] += delta.tokens
        if self._stream and delta.tokens:
            chunk = vb.GenerateStreamChunk(
                token_ids=i32(delta.token_ids, "token_ids").tolist(),
                prompt_tokens=len(sequence.spec.prompt_ids),
                completion_tokens=self._completion_tokens[delta.index],
                cached_tokens=sequence.engine.cached_tokens,
                index=delta.index,
            )
            if self._logprobs:
                chunk.output_logprobs.CopyFrom(output_logprobs(delta.entries))
            yield vb.GenerateResponse(chunk=chunk)
        if delta.finish:
            yield self.complete(sequence, FINISH_NAMES.get(delta.finish, "error"), delta.stop_reason)

    def complete(
        self, sequence: SequenceState, finish: str, stop_reason: str | int | None = None
    ) -> vb.GenerateResponse:
        """Make the response that ends a choice: all token ids that the tokenizer has confirmed, usage and `finish`. It
        has logprobs of answer and prompt if asked for. A `stop_reason` is the matched token id or the matched stop
        string; a string is reported only if `finish` is `stop`."""
        whole = vb.GenerateComplete(
            output_ids=i32(bytes(sequence.engine.output_ids[: 4 * sequence.text.confirmed]), "output_ids").tolist(),
            finish_reason=finish,
            prompt_tokens=len(sequence.spec.prompt_ids),
            completion_tokens=sequence.text.confirmed,
            cached_tokens=sequence.engine.cached_tokens,
            index=sequence.index,
        )
        if self._logprobs:
            whole.output_logprobs.CopyFrom(output_logprobs(sequence.engine.entries[: sequence.text.confirmed]))
        if self._prompt_logprobs:
            entries = self._generation.prompt_entries(sequence.index)
            whole.input_logprobs.CopyFrom(input_logprobs(sequence.spec.prompt_ids.tolist(), entries))
        if isinstance(stop_reason, int):
            whole.matched_token_id = stop_reason
        elif isinstance(stop_reason, str) and finish == "stop":
            whole.matched_stop_str = stop_reason
        return vb.GenerateResponse(complete=whole)


def output_logprobs(entries: Sequence[LogprobEntry]) -> vb.OutputLogProbs:
    """Convert entries to vLLM's logprobs of an answer: per token its id, its logprob, and the top alternatives."""
    return vb.OutputLogProbs(
        token_logprobs=[entry.logprob for entry in entries],
        token_ids=[entry.token_id for entry in entries],
        top_logprobs=[vb.TopLogProbs(values=entry.top_logprobs, token_ids=entry.top_ids) for entry in entries],
    )


def input_logprobs(ids: Sequence[int], entries: Sequence[LogprobEntry | None]) -> vb.InputLogProbs:
    """Convert entries to vLLM's logprobs of a prompt, one per token. A token without an entry, such as the first token,
    has no value."""
    return vb.InputLogProbs(
        token_ids=ids,
        token_logprobs=[vb.InputTokenLogProb(value=None if entry is None else entry.logprob) for entry in entries],
        top_logprobs=[
            vb.TopLogProbs() if entry is None else vb.TopLogProbs(values=entry.top_logprobs, token_ids=entry.top_ids)
            for entry in entries
        ],
    )
