"""One sequence of a job while it runs: what the engine sent, what the tokenizer made of it, what is yet unsent.

Everything that another replica or tokenizer would need to carry on is here: prompt ids, emitted ids, seed, characters
sent, attempt. Knows neither streams nor formats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_router.core.delta import STOP, Delta, HopTiming, LogprobEntry

if TYPE_CHECKING:
    from quire_common.errors import QuireError
    from quire_common.sequence import RequestContext, Sequence
    from quire_router.core.job import GenerateJob
    from quire_router.core.outbox import Outbox
    from quire_router.engine.session import Session


class Choice:
    """Mutable; touched by its session (rows in), its Detokenize stream (text in) and its generation (news out)."""

    __slots__ = (
        "_parts",
        "_taken",
        "attempt",
        "cached_tokens",
        "chars_sent",
        "confirmed",
        "context",
        "detokenize_rows",
        "detokenize_us",
        "dirty",
        "ended",
        "entries",
        "finish",
        "first_token_ns",
        "handle",
        "index",
        "job",
        "last_token_ns",
        "news",
        "offsets",
        "outbox",
        "output_ids",
        "rows_back",
        "rows_out",
        "sequence",
        "session",
        "stop_reason",
        "stop_token_ids",
        "timings",
        "token_news",
    )

    def __init__(
        self, index: int, handle: int, job: GenerateJob, sequence: Sequence, context: RequestContext, outbox: Outbox
    ) -> None:
        self.index = index
        self.handle = handle
        self.attempt = context.attempt
        self.job = job
        self.sequence = sequence
        self.context = context
        self.outbox = outbox
        self.session: Session | None = None
        # What the engine sent.
        self.output_ids = bytearray()
        self.rows_out = 0
        self.finish = 0
        self.stop_reason: str | int | None = None
        # All ids that end it, the model's own included: the tokenizer hides their text.
        self.stop_token_ids = job.stop_token_ids
        self.entries: list[LogprobEntry] = []
        self.cached_tokens = 0
        self.timings: tuple[HopTiming, ...] = ()
        self.first_token_ns = 0
        self.last_token_ns = 0
        # What the tokenizer made of it: `confirmed` tokens count, their text has `chars_sent` characters so far.
        self.rows_back = 0
        self.confirmed = 0
        self.chars_sent = 0
        self.offsets: list[int] = []
        self.detokenize_us = 0.0
        self.detokenize_rows = 0
        # What the client has not seen.
        self.news = job.wants.news
        self.token_news = job.wants.news and (job.wants.every_token or job.wants.token_ids or self.wants_logprobs)
        self.dirty = False
        self.ended = False
        self._parts: list[str] = []
        self._taken = 0

    @property
    def wants_logprobs(self) -> bool:
        """Whether every token has an entry."""
        return self.sequence.sampling.logprobs >= 0

    def received(self, token_ids: bytes, finish: int, now_ns: int) -> None:
        """A row of the engine: some tokens, and perhaps the end."""
        self.output_ids += token_ids
        self.rows_out += 1
        if finish:
            self.finish = finish
        if token_ids:
            if not self.first_token_ns:
                self.first_token_ns = now_ns
            self.last_token_ns = now_ns

    def delivered(self, text: str, stop_index: int, used: int) -> bool:
        """The tokenizer's answer to a row. True: the choice has ended by it."""
        self.rows_back += 1
        self.confirmed += used
        if text:
            self._parts.append(text)
            self.chars_sent += len(text)
        if stop_index >= 0:
            stops = self.job.text.stop
            self.finish, self.stop_reason = STOP, stops[stop_index] if stop_index < len(stops) else None
            self.ended = True
        elif self.finish and self.rows_back == self.rows_out:
            self.ended = True
        if self.ended or (text and self.news) or (used and self.token_news):
            self.outbox.touch(self)
        return self.ended

    def fail(self, error: QuireError) -> None:
        """The choice cannot go on, and its job with it."""
        self.ended = True
        self.outbox.fail(error)

    def unconfirmed(self) -> bytes:
        """Tokens that the tokenizer has not answered for: a new Detokenize stream takes up here."""
        return bytes(self.output_ids[4 * self.confirmed :])

    def take(self) -> Delta:
        """What is new since the last call."""
        start, end = self._taken, self.confirmed
        self._taken = end
        parts = self._parts
        text = parts[0] if len(parts) == 1 else "".join(parts)
        self._parts = []
        ids = bytes(self.output_ids[4 * start : 4 * end]) if self.job.wants.token_ids else b""
        entries = self.entries[start:end] if self.entries else []
        offsets = self.offsets[start:end] if self.offsets else []
        finish, reason = (self.finish, self.stop_reason) if self.ended else (0, None)
        return Delta(self.index, text, end - start, ids, entries, offsets, finish, reason)
