"""A job in flight, for its one consumer: deltas, token usage, timings, and a `close` that releases everything."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import numpy as np

from quire_common.errors import QuireError
from quire_common.telemetry import tracing
from quire_router import metrics
from quire_router.off_loop import MOST_VALUES, off_loop
from quire_router.requests.deadline import request_timeout, time_left_s
from quire_router.sequences.delta import FINISH_NAMES, LENGTH, Delta, HopTiming, Usage
from quire_router.sequences.logprob_entries import PromptEntries, unpack_entry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from quire_router.loop_budget import LoopBudget
    from quire_router.requests.catalog import ServedModel
    from quire_router.sequences.delta import LogprobEntry
    from quire_router.sequences.delta_queue import DeltaQueue
    from quire_router.sequences.job import Caller, GenerateJob
    from quire_router.sequences.kv_route import KvOffer
    from quire_router.sequences.sequence_state import SequenceState
    from quire_router.text.token_bytes import TokenBytes


class Generation:
    """A job whose sequences are submitted. The pipeline makes it, and its consumer must call `close` on every path. The
    deadline's timer starts when the generation is made. A place is the right to have one sequence in flight (see
    Admission)."""

    def __init__(
        self,
        job: GenerateJob,
        caller: Caller,
        served: ServedModel,
        sequences: Sequence[SequenceState],
        delta_queue: DeltaQueue[SequenceState],
        token_bytes: TokenBytes,
        loop_budget: LoopBudget,
        arrived_ns: int,
        release: Callable[[Usage], None],
        span: tracing.Span,
        *,
        counted: bool = True,
        prompt_texts: Sequence[str] = (),
    ) -> None:
        """Without `counted`, the generation is a part of a larger request, for which the metrics are recorded once. If
        the caller has a timeout, start the timer that cancels the generation when the request's time is over."""
        self.job = job
        self.caller = caller
        self.served = served
        self.sequences = sequences
        self.token_bytes = token_bytes
        self._loop_budget = loop_budget
        self.prompt_texts = prompt_texts
        self.created = int(time.time())
        self.running = len(sequences)
        self.router_timings: list[HopTiming] = []
        # When the request arrived: `time.monotonic_ns()`.
        self.arrived_ns = arrived_ns
        self._delta_queue = delta_queue
        self._release: Callable[[Usage], None] | None = release
        self._span = span
        self._counted = counted
        self._wants_logprobs = job.sampling.logprobs >= 0 and job.wants.logprobs
        # With streamed logprobs, one call returns at most so many tokens of all sequences together, because much output
        # can wait for a slow client.
        many = job.wants.stream and self._wants_logprobs
        self._most_tokens = MOST_VALUES // (2 + job.sampling.logprobs) if many else None
        self._deadline: asyncio.TimerHandle | None = None
        left_s = time_left_s(caller, arrived_ns)
        if left_s is not None:
            self._deadline = asyncio.get_running_loop().call_later(max(0.0, left_s), self._time_out)

    async def next_deltas(self) -> list[Delta]:
        """Wait for new output and return it, one delta per sequence that has some. Lowers `running` by the sequences
        that end. Fetches the bytes of all tokens in its logprobs into `token_bytes`; when a sequence ends in a job with
        prompt logprobs, also those of the prompts and of their logprobs. With streamed logprobs, waits for its share of
        the event loop, too. Returns an empty list if the output was dropped meanwhile (see `abandon`).

        Call only while `running`. If `listens` is True, a call that is cancelled loses no output. Raises the QuireError
        that ended the job, after the last deltas, and the tokenizer's QuireError.
        """
        await self._delta_queue.wait()
        if self._most_tokens is not None:
            tokens = min(self._most_tokens, sum(sequence.client.waiting_tokens for sequence in self.sequences))
            await self._loop_budget.acquire(tokens * (2 + self.job.sampling.logprobs))
        deltas = self._deltas(self._delta_queue.take_sequences())
        if self._wants_logprobs:
            await self.token_bytes.ensure(
                token_id for d in deltas for e in d.entries for token_id in (e.token_id, *e.top_ids)
            )
        if self.job.sampling.prompt_logprobs >= 0 and any(delta.finish for delta in deltas):
            packed = [entry for sequence in self.sequences for entry in sequence.engine.prompt_entries.values()]
            ids = await off_loop(
                lambda: {token_id for e in map(unpack_entry, packed) for token_id in (e.token_id, *e.top_ids)},
                heavy=len(packed) * (1 + self.job.sampling.prompt_logprobs) > MOST_VALUES,
                tenant=self.caller.tenant,
            )
            # A prompt's first token has no entry. No prompt token has one if the engine does not score prompts.
            for sequence in self.sequences[:: self.job.siblings]:
                ids.update(np.unique(sequence.spec.prompt_ids).tolist())
            # Ask again for all tokens of this answer, because other requests may have pushed some out of the cache.
            ids |= {token_id for d in deltas for e in d.entries for token_id in (e.token_id, *e.top_ids)}
            await self.token_bytes.ensure(ids)
        return deltas

    @property
    def listens(self) -> bool:
        """Whether `call_when_ready` and `take_deltas` may be used, and `next_deltas` may be cancelled without a loss of
        output. This is so if the deltas have no logprobs, because only logprobs need a call to a tokenizer."""
        return not self._wants_logprobs and self.job.sampling.prompt_logprobs < 0

    def call_when_ready(self, listener: Callable[[], None]) -> None:
        """Call `listener` once, when there are deltas or an error, which `take_deltas` then returns or raises. May be
        used instead of `next_deltas` if `listens` is True."""
        self._delta_queue.call_when_ready(listener)

    def take_deltas(self) -> list[Delta]:
        """Return the new output, perhaps none, without waiting, and lower `running` by the sequences that end. Call
        only if `listens`: unlike `next_deltas`, this fetches no bytes of tokens. Raises the QuireError that ended the
        job, after the last deltas."""
        deltas = self._deltas(self._delta_queue.take_sequences())
        if not deltas and self._delta_queue.error is not None:
            raise self._delta_queue.error
        return deltas

    def _deltas(self, sequences: Sequence[SequenceState]) -> list[Delta]:
        """Take a delta from each sequence, and subtract the sequences that end from `running`. If logprobs are
        streamed, the size of a delta is bounded, and a sequence that has more output is queued again. Deltas of a
        `prompt_only` job have no text and no tokens."""
        most = None if self._most_tokens is None or not sequences else max(1, self._most_tokens // len(sequences))
        deltas = [sequence.client.take_delta(most) for sequence in sequences]
        for sequence, delta in zip(sequences, deltas, strict=True):
            if delta.finish:
                self.running -= 1
            elif most is not None and sequence.client.waiting_tokens:
                self._delta_queue.add(sequence)
        return [_emptied(delta) for delta in deltas] if self.job.prompt_only else deltas

    @property
    def is_large(self) -> bool:
        """Whether the whole answer lists more than 8192 values: tokens and logprob alternatives. A thread should write
        such an answer, not the event loop. Call when all sequences have ended."""
        sampling, wants = self.job.sampling, self.job.wants
        listed = sampling.logprobs >= 0 or wants.token_ids
        answers = self.usage().completion_tokens if listed else 0
        prompts = 0
        if wants.echo or wants.token_ids or sampling.prompt_logprobs >= 0:
            prompts = sum(len(self.prompt_ids(index)) for index in range(self.answer_count))
        return answers * (2 + sampling.logprobs) + prompts * (2 + sampling.prompt_logprobs) > MOST_VALUES

    @property
    def answer_count(self) -> int:
        """The number of answers that the client gets, without the sequences that `best_of` leaves out."""
        return len(self.job.prompts) * self.job.n

    @property
    def kv_offer(self) -> KvOffer | None:
        """The offer of KV pages that are kept for the client, if the client asked to keep them. Read when all sequences
        have ended."""
        return self.sequences[0].kv.offer if self.job.kv_export else None

    def prompt_ids(self, index: int) -> NDArray[np.int32]:
        """Return the token ids of the prompt to which the answer with this index belongs."""
        return self.sequences[index // self.job.n * self.job.siblings].spec.prompt_ids

    def prompt_entries(self, index: int) -> Sequence[LogprobEntry | None]:
        """Return a logprob entry for each token of the prompt to which the answer with this index belongs. It is None
        for the first token, and where the engine has sent none. Call when its sequence has ended."""
        sequence = self.sequences[index // self.job.n * self.job.siblings]
        return PromptEntries(sequence.engine.prompt_entries, len(sequence.spec.prompt_ids))

    def set_prompt_texts(self, texts: Sequence[str]) -> None:
        """Set the texts of the prompts, for echo, if they were not known when the generation was made."""
        self.prompt_texts = texts

    def add_timings(self, *timings: HopTiming) -> None:
        """Add timings of the router's own phases, in their order."""
        self.router_timings += timings

    def cancel(self, error: QuireError) -> None:
        """Abort all sequences at their engines. The consumer still gets the output that waits; then `next_deltas`
        raises `error`, or an earlier error that ended the job."""
        self._delta_queue.fail(error)
        self._abort()

    def _time_out(self) -> None:
        """Cancel the generation with REQUEST_TIMEOUT. Called at the deadline."""
        self.cancel(request_timeout(self.caller.timeout_s))

    def abandon(self, error: QuireError) -> None:
        """Abort all sequences because the client has left. Output that waits is dropped, and `next_deltas` next raises
        `error`, or an earlier error that ended the job."""
        self._delta_queue.drop()
        self.cancel(error)

    def usage(self) -> Usage:
        """Return the tokens used so far. Prompt tokens and cached tokens count once per prompt. Completion tokens count
        when their text has come, for all sequences, with those of a stream that the client resumes; a `prompt_only` job
        has none, and no reasoning tokens."""
        prompt_tokens = completion_tokens = cached_tokens = reasoning_tokens = 0
        for sequence in self.sequences[:: self.job.siblings]:
            prompt_tokens += len(sequence.spec.prompt_ids)
            cached_tokens += sequence.engine.cached_tokens
        if not self.job.prompt_only:
            for sequence in self.sequences:
                completion_tokens += sequence.text.confirmed
                reasoning_tokens += sequence.text.reasoning_tokens
        return Usage(prompt_tokens, completion_tokens, cached_tokens, reasoning_tokens)

    def timings(self) -> list[HopTiming]:
        """Return how long each phase of each service took: the router's own phases first, of which `total` lasts until
        now, so that it grows with each call. The times of migrations, detokenizing, engines and KV routes are sums over
        all sequences; the last two by service, phase and instance."""
        total_us = (time.monotonic_ns() - self.arrived_ns) // 1000
        routes, engines = list[HopTiming](), list[HopTiming]()
        migrate_us = migrations = detokenize_rows = 0
        detokenize_us = 0.0
        for sequence in self.sequences:
            if sequence.kv.route is not None:
                routes += sequence.kv.route.timings()
            engines += sequence.engine.timings
            detokenize_us += sequence.text.detokenize_us
            detokenize_rows += sequence.text.detokenize_rows
            if sequence.migration_history is not None:
                migrate_us += sequence.migration_history.total_us
                migrations += sequence.migration_history.times
        timings = [*self.router_timings]
        if migrations:
            timings.append(HopTiming("router", "migrate", migrate_us, migrations))
        timings.append(HopTiming("router", "total", total_us))
        timings.append(HopTiming("tokenizer", "detokenize", int(detokenize_us), detokenize_rows))
        return timings + _summed(routes + engines)

    def close(self) -> None:
        """End the generation: abort sequences that still run, call `release`, and record metrics and the trace.
        `release` gives the places back and charges the used tokens, unless a larger request does both. Idempotent."""
        release, self._release = self._release, None
        if release is None:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._abort()
        usage = self.usage()
        release(usage)
        self._record_end(usage)

    def discard(self) -> None:
        """Abort all sequences of a job that could not be started. Its places are given back by the caller. Nothing is
        charged or recorded, and a later `close` does nothing."""
        self._release = None
        if self._deadline is not None:
            self._deadline.cancel()
        self._abort()

    def _abort(self) -> None:
        for sequence in self.sequences:
            sequence.abort()

    def _first_ns(self) -> int:
        """Return the time of the earliest first token of all sequences, from `time.monotonic_ns()`; 0 if no token has
        come."""
        return min((c.engine.first_token_ns for c in self.sequences if c.engine.first_token_ns), default=0)

    def _reasons(self) -> list[str]:
        """Return the finish reason of each sequence; `abort` for a sequence that has none."""
        return [FINISH_NAMES.get(c.client.finish, "abort") if c.client.ended else "abort" for c in self.sequences]

    def _record_end(self, usage: Usage) -> None:
        """Record the number of attempts of each sequence, lost reservations included. Unless the generation is a part
        of a larger request, record the request's metrics, and count an error that ended the job because of load. With
        tracing, describe the result in the trace span, and end the span."""
        for sequence in self.sequences:
            metrics.attempts.observe(sequence.attempt + 1)
        now_ns, first_ns, reasons = time.monotonic_ns(), self._first_ns(), self._reasons()
        if self._counted:
            self._count_request(usage, now_ns, first_ns, reasons)
            if self._delta_queue.error is not None:
                metrics.shed(self._delta_queue.error, self.caller.tenant_name)
        if tracing.enabled():
            wall = time.time_ns() - now_ns
            if first_ns:
                self._span.add_event("first token", timestamp=first_ns + wall)
            for sequence in self.sequences:
                if sequence.migration_history is not None:
                    for when_ns, fields in sequence.migration_history.events:
                        self._span.add_event("migrated", fields, when_ns)
            self._span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
            self._span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
            self._span.set_attribute("gen_ai.response.finish_reasons", reasons)
            self._span.end()

    def _count_request(self, usage: Usage, now_ns: int, first_ns: int, reasons: Sequence[str]) -> None:
        """Record a request's tokens, latencies and finish reasons in the metrics."""
        metrics.of_tenant(self.caller.tenant_name).request_ended(usage.prompt_tokens, usage.completion_tokens)
        counts = metrics.of_model(self.served.model.name)
        counts.cached_tokens.inc(usage.cached_tokens)
        counts.generation_tokens.inc(usage.completion_tokens)
        counts.request_prompt_tokens.observe(usage.prompt_tokens)
        counts.request_generation_tokens.observe(usage.completion_tokens)
        counts.request_n.observe(self.job.n)
        counts.e2e.observe((now_ns - self.arrived_ns) / 1e9)
        if first_ns:
            counts.ttft.observe((first_ns - self.arrived_ns) / 1e9)
        for sequence in self.sequences:
            counts.request_max_tokens.observe(sequence.spec.stop.max_tokens)
            if seconds := sequence.engine.seconds_per_token:
                counts.tpot.observe(seconds)
        for reason in reasons:
            counts.sequence_finished(reason)


def _summed(timings: Sequence[HopTiming]) -> list[HopTiming]:
    """Return one timing for each service, phase and instance, with the sums of its times and counts, in the order in
    which they first occur."""
    sums: dict[tuple[str, str, str], HopTiming] = {}
    for one in timings:
        key = one.service, one.phase, one.instance
        known = sums.get(key)
        if known is None:
            sums[key] = one
        else:
            sums[key] = HopTiming(one.service, one.phase, known.us + one.us, known.count + one.count, one.instance)
    return list(sums.values())


def _emptied(delta: Delta) -> Delta:
    """Return the delta without its text and tokens, for a job that generates nothing (`prompt_only`). The finish reason
    becomes `length`."""
    return Delta(delta.index, "", 0, b"", [], [], LENGTH if delta.finish else 0, None)
