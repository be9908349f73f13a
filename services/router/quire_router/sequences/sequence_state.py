"""One sequence of a job while it runs: what the engine sent, what the tokenizer made of it, what is yet unsent.

Everything that another replica or tokenizer would need to carry on is here: prompt ids, emitted ids, seed, characters
sent, attempt. Knows neither streams nor formats.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from quire_common.columns import i32
from quire_router.sequences.delta import ERROR, LENGTH, REPETITION, STOP, Delta, HopTiming, LogprobEntry

if TYPE_CHECKING:
    from quire_common.errors import QuireError
    from quire_common.sequence import RequestContext, Sequence
    from quire_common.ticket import KvTransfer
    from quire_router.placement.load_reservation import LoadReservation
    from quire_router.sequences.delta_queue import DeltaQueue
    from quire_router.sequences.job import GenerateJob, Resume
    from quire_router.sequences.kv_route import KvOffer, KvRoute, PulledPages
    from quire_router.sequences.migration_history import MigrationHistory


# vLLM's stop_reason of such an answer.
_REPEATED = "repetition_detected"
# Stands for an entry that the client has.
_TOLD = LogprobEntry(0, 0.0, 0, [], [])


class Holder(Protocol):
    """Who has a choice now: a session, or the room where those wait that have none."""

    def abort(self, sequence: SequenceState) -> None:
        """Nobody wants it any more; nothing more is heard of it. Idempotent."""


class SequenceState:
    """Mutable; touched by its session (rows in), its Detokenize stream (text in) and its generation (news out)."""

    __slots__ = (
        "_parts",
        "_taken",
        "admitted_attempt",
        "attempt",
        "cached_tokens",
        "chars_sent",
        "confirmed",
        "context",
        "delta_queue",
        "detokenize_rows",
        "detokenize_us",
        "digest",
        "dirty",
        "ended",
        "entries",
        "finish",
        "first_token_ns",
        "handle",
        "held_tokens",
        "holder",
        "index",
        "job",
        "kv_offer",
        "kv_route",
        "last_attempt",
        "last_token_ns",
        "migration_history",
        "model",
        "news",
        "offsets",
        "output_ids",
        "page_hashes",
        "placed",
        "prompt_entries",
        "resumed",
        "rows_back",
        "rows_out",
        "spec",
        "stop_reason",
        "stop_token_ids",
        "text_strikes",
        "timings",
        "token_news",
    )

    def __init__(
        self,
        index: int,
        handle: int,
        job: GenerateJob,
        spec: Sequence,
        context: RequestContext,
        delta_queue: DeltaQueue[SequenceState],
        model: str = "",
    ) -> None:
        self.index = index
        self.handle = handle
        # Attempts may be promised to engines ahead of their turn: the last one that was.
        self.attempt = self.last_attempt = context.attempt
        self.job = job
        self.spec = spec
        self.context = context
        self.delta_queue = delta_queue
        self.model = model
        # Where it is, and what it went through: `digest` is that of the engine's model, None until one was found.
        self.holder: Holder | None = None
        self.digest: bytes | None = None
        self.migration_history: MigrationHistory | None = None
        # Of the prompt's full pages, by page size, while siblings that share this are placed; empty: not known.
        self.page_hashes: dict[int, list[bytes]] = {}
        # Where its pages travel between engines.
        self.kv_route: KvRoute | None = None
        self.kv_offer: KvOffer | None = None
        # Until its engine has begun, or has let go of it; siblings are placed by the first of them.
        self.placed: LoadReservation | None = None
        # Leading tokens whose pages anybody had when it was placed; None: not known.
        self.held_tokens: int | None = None
        self.admitted_attempt = -1
        # Whether this attempt began with tokens of an earlier one.
        self.resumed = False
        # What the engine sent.
        self.output_ids = bytearray()
        self.rows_out = 0
        self.finish = 0
        self.stop_reason: str | int | None = None
        # All ids that end it, the model's own included: the tokenizer hides their text.
        self.stop_token_ids = job.stop_token_ids
        self.entries: list[LogprobEntry] = []
        self.prompt_entries: dict[int, LogprobEntry] = {}
        """By position; where the client asked for them."""
        self.cached_tokens = 0
        self.timings: tuple[HopTiming, ...] = ()
        self.first_token_ns = 0
        self.last_token_ns = 0
        # What the tokenizer made of it: `confirmed` tokens count, their text has `chars_sent` characters so far.
        self.rows_back = 0
        self.confirmed = 0
        self.chars_sent = 0
        self.offsets: list[int] = []
        # Tokenizers in a row that were lost while they worked on it.
        self.text_strikes = 0
        self.detokenize_us = 0.0
        self.detokenize_rows = 0
        # What the client has not seen.
        self.news = job.wants.stream
        self.token_news = job.wants.stream and (job.wants.every_token or job.wants.token_ids or self.wants_logprobs)
        self.dirty = False
        self.ended = False
        self._parts: list[str] = []
        self._taken = 0

    @property
    def wants_logprobs(self) -> bool:
        """Whether every token has an entry."""
        return self.spec.sampling.logprobs >= 0

    @property
    def max_len(self) -> int:
        """Prompt and longest answer together."""
        return len(self.spec.prompt_ids) + self.spec.stop.max_tokens

    @property
    def submitted(self) -> bool:
        """Whether an engine was ever asked to run it."""
        return self.digest is not None

    @property
    def admitted(self) -> bool:
        """Whether the engine of the present attempt has begun to run it."""
        return self.admitted_attempt == self.attempt

    @property
    def admitted_once(self) -> bool:
        """Whether an engine ever began to run it."""
        return self.admitted_attempt >= 0

    def to_submit(self) -> Sequence:
        """What an engine must be told, also one that takes it up: all tokens so far are part of it."""
        if not self.output_ids and not self.prompt_entries:
            return self.spec
        spec = replace(self.spec, output_ids=i32(bytes(self.output_ids), "output_ids"))
        if self.prompt_entries and len(self.prompt_entries) == len(spec.prompt_ids) - 1:
            # All is said of its prompt: who takes it up need not compute it for that.
            sampling = replace(spec.sampling, prompt_logprobs=-1)
            spec = replace(spec, sampling=sampling, skip_cache_read=False)
        return spec

    def take_up(self, resume: Resume) -> None:
        """Go on behind what the client of a broken stream has; before it is submitted."""
        self.output_ids += resume.output_ids
        self.confirmed = self._taken = resume.tokens
        self.chars_sent = resume.characters
        self.resumed = bool(resume.output_ids)
        if self.wants_logprobs:  # entries and offsets go by the token's place
            self.entries = [_TOLD] * resume.tokens
            self.offsets = [0] * resume.tokens

    def kv_transfer(self) -> KvTransfer | None:
        """What the engine that it is with must be told of pages beside `to_submit`."""
        return self.kv_route.kv_transfer(self.holder) if self.kv_route is not None else None

    def pulled(self, found: PulledPages) -> None:
        """The engine that it is with has got pages from another."""
        if self.kv_route is not None:
            self.kv_route.pulled(found)

    def next_attempt(self) -> int:
        """The number of an attempt that nobody else has."""
        self.last_attempt += 1
        return self.last_attempt

    def renew(self, handle: int, attempt: int | None = None) -> None:
        """Another attempt begins, from all that is known: the next, or one that was promised ahead. What was said of
        the old handle finds nobody."""
        self.handle = handle
        self.attempt = self.next_attempt() if attempt is None else attempt
        self.context = replace(self.context, attempt=self.attempt)
        self.resumed = bool(self.output_ids)

    def settle(self) -> None:
        """The engine says no more: see what there is of it."""
        if self.finish == ERROR:
            self.finish = 0
        if self.finish:
            return
        if self.wants_logprobs and len(self.entries) >= self.confirmed:
            # A token without its entry is computed again: engines give the same one.
            del self.output_ids[4 * len(self.entries) :]
        if len(self.output_ids) >= 4 * self.spec.stop.max_tokens:
            self.finish = LENGTH

    def received(self, token_ids: bytes, finish: int, now_ns: int) -> None:
        """A row of the engine: some tokens, and perhaps the end."""
        self.output_ids += token_ids
        self.rows_out += 1
        if finish:
            self.finish = finish
            if finish == REPETITION:
                self.stop_reason = _REPEATED
        if self.placed is not None:
            self.unplace()
        if self.kv_route is not None:
            self.kv_route.received(finish, now_ns)
        if token_ids:
            if not self.first_token_ns:
                self.first_token_ns = now_ns
            self.last_token_ns = now_ns

    def unplace(self) -> None:
        """Its prompt is no work ahead of an engine any more. Idempotent."""
        placed, self.placed = self.placed, None
        if placed is not None:
            placed.release()

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
            self.delta_queue.touch(self)
        if self.ended and self.kv_route is not None:
            self.kv_route.close()
        return self.ended

    def fail(self, error: QuireError) -> None:
        """The choice cannot go on, and its job with it."""
        self.ended = True
        self.delta_queue.fail(error)
        if self.kv_route is not None:
            self.kv_route.close()

    def abort(self) -> None:
        """Nobody wants it any more, wherever it is. Idempotent."""
        if self.holder is not None:
            self.holder.abort(self)
        if self.kv_route is not None:
            self.kv_route.close()

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
