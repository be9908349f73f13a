"""One sequence of a job while it runs: its identity, and one record each for the engine, the tokenizer, the client, the
placement and the KV transfer.

The state contains everything that another replica or tokenizer needs to continue the sequence: prompt ids, output ids,
seed, characters sent, attempt. Callers report events by calling methods, which update the records. This module knows
neither streams nor formats.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from quire_common.columns import i32
from quire_common.structured.constraint import CONSTRAINT_PARAM
from quire_router.sequences.client_progress import ClientProgress
from quire_router.sequences.delta import STOP
from quire_router.sequences.engine_progress import EngineProgress
from quire_router.sequences.kv_progress import KvProgress
from quire_router.sequences.migration_history import MigrationHistory
from quire_router.sequences.sequence_placement import SequencePlacement
from quire_router.sequences.structured import naming_field
from quire_router.sequences.text_progress import TextProgress

if TYPE_CHECKING:
    from quire_common.errors import QuireError
    from quire_common.sequence import RequestContext, Sequence
    from quire_common.ticket import KvTransfer
    from quire_router.sequences.delta_queue import DeltaQueue
    from quire_router.sequences.job import GenerateJob, Resume
    from quire_router.sequences.kv_route import PulledPages


class Holder(Protocol):
    """The object that has a sequence now: a session with a scheduler, or PendingSequences."""

    def abort(self, sequence: SequenceState) -> None:
        """Stop the sequence. No later message changes it. Idempotent."""


class SequenceState:
    """One sequence. Its session adds rows, its Detokenize stream adds text, and its generation takes deltas. Its KV
    route, if it has one, is the object that has its KV pages transferred between engines."""

    __slots__ = (
        "attempt",
        "client",
        "context",
        "delta_queue",
        "engine",
        "follows_rows",
        "handle",
        "holder",
        "index",
        "job",
        "kv",
        "last_attempt",
        "migration_history",
        "model",
        "placement",
        "queued",
        "spec",
        "stop_token_ids",
        "text",
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
        stop_token_ids: tuple[int, ...] | None = None,
    ) -> None:
        """`stop_token_ids`: all ids that end the sequence, with those of the model; None: only those of the job."""
        self.index = index
        self.handle = handle
        # `last_attempt` may be ahead of `attempt`, because a reservation gets its attempt number before it is used.
        self.attempt = self.last_attempt = context.attempt
        self.job = job
        self.spec = spec
        self.context = context
        self.delta_queue = delta_queue
        self.model = model
        # The tokenizer hides their text.
        self.stop_token_ids = job.stop_token_ids if stop_token_ids is None else stop_token_ids
        self.holder: Holder | None = None
        self.engine = EngineProgress()
        self.text = TextProgress()
        self.client = ClientProgress(index, self.engine, self.text, job.wants, with_entries=self.wants_logprobs)
        self.queued = False
        # Whether `row_came` must be called. A flag, because the hot path asks for every row.
        self.follows_rows = False
        self.placement = SequencePlacement()
        self.kv = KvProgress()
        # None until an engine is lost or none can be found.
        self.migration_history: MigrationHistory | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether every token has an entry."""
        return self.spec.sampling.logprobs >= 0

    @property
    def max_len(self) -> int:
        """The number of tokens of the prompt and the longest answer together."""
        return len(self.spec.prompt_ids) + self.spec.stop.max_tokens

    @property
    def submitted(self) -> bool:
        """Whether an engine was ever asked to run it."""
        return self.placement.digest is not None

    @property
    def all_answered(self) -> bool:
        """Whether the tokenizer has answered every row of the engine."""
        return self.text.rows_back == self.engine.rows + self.text.more_rows

    @property
    def admitted(self) -> bool:
        """Whether the engine of the present attempt has begun to run it."""
        return self.engine.admitted_attempt == self.attempt

    @property
    def admitted_once(self) -> bool:
        """Whether an engine ever began to run it."""
        return self.engine.admitted_attempt >= 0

    @property
    def bound_digest(self) -> bytes | None:
        """The digest of the model that must continue the sequence: that of the last engine that was asked, if the
        sequence has tokens and an engine ever began to run it. Otherwise None: any model of its name may run it."""
        return (self.placement.digest or None) if self.engine.output_ids and self.admitted_once else None

    @property
    def held_tokens(self) -> int | None:
        """The number of leading tokens whose pages some engine or kvstore had at the placement; None: not known."""
        return self.placement.held_tokens

    def to_submit(self) -> Sequence:
        """Return the sequence for a Submit, with all tokens so far, so that another engine can continue it. If all
        prompt logprobs have come, the Submit does not ask for them again, and the engine may read caches."""
        engine = self.engine
        if not engine.output_ids and not engine.prompt_entries:
            return self.spec
        spec = replace(self.spec, output_ids=i32(bytes(engine.output_ids), "output_ids"))
        if engine.prompt_entries and len(engine.prompt_entries) == len(spec.prompt_ids) - 1:
            # All prompt logprobs have come, so the next engine may take the prompt's pages from a cache.
            sampling = replace(spec.sampling, prompt_logprobs=-1)
            spec = replace(spec, sampling=sampling, skip_cache_read=False)
        return spec

    def kv_transfer(self) -> KvTransfer | None:
        """Return the KV transfer for the Submit to the present holder; None if no pages are transferred."""
        return self.kv.route.kv_transfer(self.holder) if self.kv.route is not None else None

    def unconfirmed_ids(self) -> bytes:
        """Return the tokens that the tokenizer has not answered yet. A new Detokenize stream continues with them."""
        return bytes(self.engine.output_ids[4 * self.text.confirmed :])

    def resume_from(self, resume: Resume) -> None:
        """Begin after the tokens and characters that the client has from an earlier, broken stream. Call before the
        sequence is submitted."""
        self.engine.start_after(resume.output_ids, with_entries=self.wants_logprobs)
        self.text.start_after(resume.tokens, resume.characters, with_offsets=self.wants_logprobs)
        self.client.start_after(resume.tokens, resume.characters)

    def hold(self, holder: Holder) -> None:
        """Note that this holder has the sequence from now on."""
        self.holder = holder
        self.follows_rows = True

    def promise_attempt(self) -> int:
        """Return the number of a new attempt, which no other engine gets."""
        self.last_attempt += 1
        return self.last_attempt

    def begin_attempt(self, handle: int, attempt: int | None = None) -> None:
        """Begin another attempt under a new handle; it continues from all tokens so far. `attempt` is a number from
        `promise_attempt`; None: the next number. Answers to the old handle are ignored."""
        self.handle = handle
        self.attempt = self.promise_attempt() if attempt is None else attempt
        self.context = replace(self.context, attempt=self.attempt)
        self.engine.begin_attempt()

    def begin_history(self, wait_s: float) -> MigrationHistory:
        """Return the history of the sequence's migrations; make it at the first call. `wait_s` is the time for which
        the sequence may be without an engine."""
        if self.migration_history is None:
            self.migration_history = MigrationHistory(wait_s, len(self.engine.output_ids))
        return self.migration_history

    def close_attempt(self) -> None:
        """Clean up after an engine that sends nothing more: forget an end by an error. If the engine had not ended the
        sequence otherwise, remove tokens whose logprob entry has not come (see `EngineProgress.close_attempt`), and end
        the sequence with the finish reason `length` if it has all its tokens."""
        self.engine.close_attempt(
            self.spec.stop.max_tokens, confirmed=self.text.confirmed, with_entries=self.wants_logprobs
        )

    def row_came(self, finish: int, now_ns: int) -> None:
        """Release the reserved load, and tell the KV route about the row. Called for the first row at this holder; if
        the sequence has a KV route, called for all rows. `finish` is the row's finish reason, 0 if this is not the last
        row."""
        self.placement.release_load()
        self.follows_rows = self.kv.route is not None
        if self.kv.route is not None:
            self.kv.route.row_came(finish, now_ns)

    def add_text(self, text: str, stop_index: int, used: int, us: float = 0.0) -> bool:
        """Add the tokenizer's answer to a row: its text, and the number of the row's tokens that count (`used`). `us`
        is the tokenizer's time in microseconds. `stop_index` is the index of the stop string that was found; -1: none.
        Queues the sequence if it has ended, or if the client is to get a delta for this answer.

        Returns whether the sequence has ended: at a stop string, or when all rows of an ended engine are answered. Then
        the KV route is closed, too.
        """
        progress, client = self.text, self.client
        progress.add_answer(len(text), used, us)
        if text:
            client.parts.append(text)
        if stop_index >= 0:
            stops = self.job.text.stop
            client.end(STOP, stops[stop_index] if stop_index < len(stops) else None)
        elif self.engine.finish and self.all_answered:
            client.end(self.engine.finish, self.engine.stop_reason)
        if client.ended or (text and client.stream_text) or (used and client.stream_tokens):
            self.delta_queue.add(self)
        if client.ended:
            self.kv.close()
        return client.ended

    def pages_pulled(self, found: PulledPages) -> None:
        """Tell the KV route that the present engine has pulled pages from another engine."""
        if self.kv.route is not None:
            self.kv.route.pages_pulled(found)

    def fail(self, error: QuireError) -> None:
        """End the sequence and its KV route, and end its whole job with this error, unless an earlier error has ended
        the job. Nothing is sent to the engine; the generation's `close` aborts what still runs. An error about the
        constraint gets the name of the client's field."""
        if error.param == CONSTRAINT_PARAM and self.job.structure is not None:
            error = naming_field(error, self.job.structure)
        self.client.end(self.engine.finish, self.engine.stop_reason)
        self.delta_queue.fail(error)
        self.kv.close()

    def abort(self) -> None:
        """Stop the sequence at its holder, and close its KV route, because its output is not wanted any more.
        Idempotent."""
        if self.holder is not None:
            self.holder.abort(self)
        self.kv.close()
