"""The output of engines for one sequence: tokens, logprobs, and the end. Messages of an engine are applied only by the
session's reducer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_router.sequences.delta import ERROR, LENGTH, REPETITION, HopTiming
from quire_router.sequences.logprob_entries import LogprobEntries, pack_entry

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quire_common.credit.prompt_logprobs import PromptLogprobs

# vLLM's stop_reason of an answer that ended by repetition detection.
_REPEATED = "repetition_detected"
# Stands for an entry that the client has already.
_CLIENT_HAS = pack_entry(0, 0.0, 0, b"", b"")


class EngineProgress:
    """The engines' output for one sequence. `output_ids` are int32 bytes. `entries` has one logprob entry per token if
    the client asks for logprobs. `rows` counts the rows that came; a row has the tokens of one engine step."""

    __slots__ = (
        "admitted_attempt",
        "cached_tokens",
        "entries",
        "finish",
        "first_token_ns",
        "given_tokens",
        "last_token_ns",
        "output_ids",
        "prompt_entries",
        "resumed",
        "rows",
        "stop_reason",
        "timings",
    )

    def __init__(self) -> None:
        self.output_ids = bytearray()
        self.rows = 0
        # A FinishReason, 0 while the engine runs it.
        self.finish = 0
        self.stop_reason: str | int | None = None
        self.entries = LogprobEntries()
        # Packed logprob entries of prompt tokens, by position, if the client asked for them.
        self.prompt_entries: dict[int, bytes] = {}
        self.cached_tokens = 0
        self.timings: tuple[HopTiming, ...] = ()
        # The last attempt that an engine began to run; -1: none yet.
        self.admitted_attempt = -1
        # Whether the present attempt began with tokens of an earlier one.
        self.resumed = False
        # Tokens that a client of a broken stream gave back.
        self.given_tokens = 0
        self.first_token_ns = 0
        self.last_token_ns = 0

    @property
    def tokens(self) -> int:
        """The number of output tokens so far."""
        return len(self.output_ids) // 4

    @property
    def seconds_per_token(self) -> float:
        """Mean seconds between two tokens; 0.0 before the second token."""
        gaps = self.tokens - self.given_tokens - 1
        return (self.last_token_ns - self.first_token_ns) / gaps * 1e-9 if gaps > 0 else 0.0

    def add_row(self, token_ids: bytes, finish: int, now_ns: int) -> None:
        """Add tokens (int32 bytes) and, at the end, the finish reason (0: this is not the end). Counts the row, and
        stores the times of the first and the last token. An end by repetition sets the stop reason. `now_ns` is a
        monotonic time."""
        self.output_ids += token_ids
        self.rows += 1
        if finish:
            self.finish = finish
            if finish == REPETITION:
                self.stop_reason = _REPEATED
        if token_ids:
            if not self.first_token_ns:
                self.first_token_ns = now_ns
            self.last_token_ns = now_ns

    def add_prompt_logprobs(self, chunk: PromptLogprobs, prompt_ids: NDArray[np.int32]) -> None:
        """Keep a chunk of the prompt's logprobs as packed entries, by position; `prompt_ids` are the whole prompt.
        After a preemption or a migration, positions may come again with the same values. Raises ValueError for a chunk
        that goes beyond the prompt."""
        logprobs, at = chunk.logprobs, 0
        tops, top_logprobs = logprobs.top_id.tobytes(), logprobs.top_logprob.tobytes()
        ids = prompt_ids[chunk.first : chunk.first + len(logprobs.logprob)].tolist()
        each = zip(ids, logprobs.logprob.tolist(), logprobs.rank.tolist(), logprobs.top_count.tolist(), strict=True)
        for position, (token_id, logprob, rank, count) in enumerate(each, start=chunk.first):
            top = slice(4 * at, 4 * (at + count))
            self.prompt_entries[position] = pack_entry(token_id, logprob, rank, tops[top], top_logprobs[top])
            at += count

    def start_after(self, output_ids: bytes, *, with_entries: bool) -> None:
        """Begin after the tokens that the client has from an earlier, broken stream. With `with_entries`, `entries`
        gets placeholders for these tokens."""
        self.output_ids += output_ids
        self.given_tokens = self.tokens
        self.resumed = bool(output_ids)
        if with_entries:  # `entries` is indexed by the token's position in the output
            self.entries = LogprobEntries([_CLIENT_HAS] * self.tokens)

    def begin_attempt(self) -> None:
        """Note that another attempt begins, which continues from the tokens so far."""
        self.resumed = bool(self.output_ids)

    def admit(self, attempt: int, cached_tokens: int) -> None:
        """Note that an engine has begun to run this attempt, and how many prompt tokens it found in caches (see
        `_set_cached`)."""
        self.admitted_attempt = attempt
        self._set_cached(cached_tokens)

    def complete(self, cached_tokens: int, timings: tuple[HopTiming, ...], stop_token_id: int | None) -> None:
        """Keep the engine's report at the end: cached tokens (see `_set_cached`), timings (in place of an earlier
        engine's) and the stop token, if there is one. `cached_tokens` may be less than at the admission, if a pull of
        pages failed."""
        self._set_cached(cached_tokens)
        self.timings = timings
        if stop_token_id is not None:
            self.stop_reason = stop_token_id

    def end_at_length(self) -> None:
        """End the sequence with the tokens that it has. The finish reason is `length`."""
        self.finish = LENGTH

    def close_attempt(self, max_tokens: int, *, confirmed: int, with_entries: bool) -> None:
        """Clean up after an engine that sends nothing more. Forget an end by an error. With `with_entries`, remove
        tokens whose logprob entry has not come, unless entries are missing for some of the `confirmed` tokens, whose
        text has come. End the sequence with the finish reason `length` if it has `max_tokens`. Does nothing else if the
        engine had ended the sequence."""
        if self.finish == ERROR:
            self.finish = 0
        if self.finish:
            return
        if with_entries and len(self.entries) >= confirmed:
            # The next engine computes a removed token again, and samples the same token.
            del self.output_ids[4 * len(self.entries) :]
        if self.tokens >= max_tokens:
            self.finish = LENGTH

    def _set_cached(self, cached_tokens: int) -> None:
        """Keep the number of cached prompt tokens, unless this attempt began with output tokens, of an earlier attempt
        or of a stream that the client resumes."""
        if not self.resumed:  # the tokens of an earlier attempt may be in a cache too: they are no prompt
            self.cached_tokens = cached_tokens
