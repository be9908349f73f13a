"""One sequence of a job while it runs: its identity, and a record for each party that has to do with it.

Everything that another replica or tokenizer would need to carry on is here: prompt ids, emitted ids, seed, characters
sent, attempt. Methods say what happened; each writes the records that this concerns. Knows neither streams nor formats.
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
    """What has a sequence now: a session, or the pending sequences."""

    def abort(self, sequence: SequenceState) -> None:
        """Stop the sequence; nothing more is heard of it. Idempotent."""


class SequenceState:
    """Touched by its session (rows in), its Detokenize stream (text in) and its generation (deltas out)."""

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
        """`stop_token_ids`: all ids that end it, the model's own included; None: the job's alone."""
        self.index = index
        self.handle = handle
        # Attempts may be promised to engines ahead of their turn: the last one that was.
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
        # Whether `row_came` is to be called: asked for every token, so that the other records are not touched for it.
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
        """Prompt and longest answer together."""
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
    def held_tokens(self) -> int | None:
        """Leading tokens whose pages anybody had when it was placed; None: not known."""
        return self.placement.held_tokens

    def to_submit(self) -> Sequence:
        """Return the sequence for a Submit, with all tokens so far, since another engine may take it up. Prompt
        logprobs that are complete are not asked for again."""
        engine = self.engine
        if not engine.output_ids and not engine.prompt_entries:
            return self.spec
        spec = replace(self.spec, output_ids=i32(bytes(engine.output_ids), "output_ids"))
        if engine.prompt_entries and len(engine.prompt_entries) == len(spec.prompt_ids) - 1:
            # All is said of its prompt: the engine that takes it up need not compute it for that.
            sampling = replace(spec.sampling, prompt_logprobs=-1)
            spec = replace(spec, sampling=sampling, skip_cache_read=False)
        return spec

    def kv_transfer(self) -> KvTransfer | None:
        """Return the KV transfer for the Submit to the present holder; None where no pages are transferred."""
        return self.kv.route.kv_transfer(self.holder) if self.kv.route is not None else None

    def unconfirmed_ids(self) -> bytes:
        """Return the tokens that the tokenizer has not answered for: a new Detokenize stream takes up here."""
        return bytes(self.engine.output_ids[4 * self.text.confirmed :])

    def resume_from(self, resume: Resume) -> None:
        """Begin behind the tokens and characters that the client of a broken stream has. Call before it is
        submitted."""
        self.engine.start_after(resume.output_ids, with_entries=self.wants_logprobs)
        self.text.start_after(resume.tokens, resume.characters, with_offsets=self.wants_logprobs)
        self.client.start_after(resume.tokens, resume.characters)

    def hold(self, holder: Holder) -> None:
        """Note that this holder has the sequence from now on."""
        self.holder = holder
        self.follows_rows = True

    def promise_attempt(self) -> int:
        """Return the number of a new attempt, for this engine alone."""
        self.last_attempt += 1
        return self.last_attempt

    def begin_attempt(self, handle: int, attempt: int | None = None) -> None:
        """Begin another attempt, from all tokens so far, under a new handle. Its number is the next one, or `attempt`,
        which was promised. Answers to the old handle are ignored."""
        self.handle = handle
        self.attempt = self.promise_attempt() if attempt is None else attempt
        self.context = replace(self.context, attempt=self.attempt)
        self.engine.begin_attempt()

    def begin_history(self, wait_s: float) -> MigrationHistory:
        """Return the history of the sequence's migrations, which is made at the first failure."""
        if self.migration_history is None:
            self.migration_history = MigrationHistory(wait_s, len(self.engine.output_ids))
        return self.migration_history

    def close_attempt(self) -> None:
        """Clean up after an engine that sends no more; see EngineProgress."""
        self.engine.close_attempt(
            self.spec.stop.max_tokens, confirmed=self.text.confirmed, with_entries=self.wants_logprobs
        )

    def row_came(self, finish: int, now_ns: int) -> None:
        """Release the reserved load, and tell the KV route of the row. Called for the first row at this holder or,
        where pages are transferred, for all."""
        self.placement.release_load()
        self.follows_rows = self.kv.route is not None
        if self.kv.route is not None:
            self.kv.route.row_came(finish, now_ns)

    def add_text(self, text: str, stop_index: int, used: int, us: float = 0.0) -> bool:
        """Add the tokenizer's answer to a row: text, and how many of its tokens count. Queues the sequence if the
        client is to hear of it. Returns True if the sequence has ended by it, `stop_index` >= 0 being the stop string
        that was found."""
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
        """Tell the KV route that the present engine has pulled pages from another."""
        if self.kv.route is not None:
            self.kv.route.pages_pulled(found)

    def fail(self, error: QuireError) -> None:
        """End the sequence, and its job with this error. One about the constraint names the client's field."""
        if error.param == CONSTRAINT_PARAM and self.job.structure is not None:
            error = naming_field(error, self.job.structure)
        self.client.end(self.engine.finish, self.engine.stop_reason)
        self.delta_queue.fail(error)
        self.kv.close()

    def abort(self) -> None:
        """Stop the sequence wherever it is: nobody wants it any more. Idempotent."""
        if self.holder is not None:
            self.holder.abort(self)
        self.kv.close()
