"""Starts jobs, for both HTTP and gRPC. The pipeline admits a job, finds its model, encodes its prompts, checks the
lengths, places its sequences on replicas, and submits them to schedulers."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from quire_common.errors import QuireError, Unsupported
from quire_common.logit_controls import NEUTRAL, check_vocabulary
from quire_common.logits_processors import check_known, processors_in
from quire_common.sequence import RequestContext, Sequence, Stop, check_sampling
from quire_common.structured.capability import check_capable
from quire_common.telemetry import tracing
from quire_router import metrics
from quire_router.loop_budget import LoopBudget
from quire_router.requests.deadline import within_deadline
from quire_router.requests.generation import Generation
from quire_router.requests.lengths import answer_length, check_prompt, check_resume, truncated
from quire_router.requests.live_generations import LiveGenerations
from quire_router.requests.products import check_compiled, check_encoded, check_request
from quire_router.requests.prompt_pages import forget_pages, name_pages
from quire_router.requests.token_charge import charged
from quire_router.sequences.delta import HopTiming
from quire_router.sequences.delta_queue import DeltaQueue
from quire_router.sequences.sequence_state import SequenceState
from quire_router.sequences.structured import naming_field

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping

    from numpy.typing import NDArray

    from quire_common.credit.hello import SamplingDefaults
    from quire_common.structured.constraint import Constraint
    from quire_router.kv_transfer.ticket_manager import TicketManager
    from quire_router.limits.concurrency import ConcurrencyLimits
    from quire_router.principal import KeyLimits
    from quire_router.replicas.migration import Migration
    from quire_router.requests.admission import Admission
    from quire_router.requests.catalog import Catalog, ServedModel
    from quire_router.requests.encoder import Encoder
    from quire_router.requests.token_charge import Charge
    from quire_router.sequences.delta import Usage
    from quire_router.sequences.handles import HandleCounter
    from quire_router.sequences.job import Caller, GenerateJob
    from quire_router.sequences.structured import AnswerStructure
    from quire_router.text.token_bytes import TokenBytes


# The tokens of prompts that are placed in one turn of the event loop, in some 10 ms.
_TURN_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class Rendering:
    """A job in the form in which it would go to an engine. `prompts` has, for each prompt, its int32 token ids and the
    most tokens of its answer."""

    job: GenerateJob
    served: ServedModel
    prompts: tuple[tuple[NDArray[np.int32], int], ...]


class Pipeline:
    """One per process; all methods run in the event loop."""

    def __init__(
        self,
        catalog: Catalog,
        encoder: Encoder,
        migration: Migration,
        handles: HandleCounter,
        admission: Admission,
        concurrency: ConcurrencyLimits,
        token_bytes: TokenBytes,
        charge: Charge,
        *,
        ticket_manager: TicketManager,
        share_prefix_across_keys: bool,
    ) -> None:
        self._catalog = catalog
        self._encoder = encoder
        self._migration = migration
        self._handles = handles
        self._admission = admission
        self._concurrency = concurrency
        self._token_bytes = token_bytes
        self.loop_budget = LoopBudget()
        self.live = LiveGenerations()
        # Called with a tenant and the number of tokens to charge.
        self.charge = charge
        self._ticket_manager = ticket_manager
        self._share = share_prefix_across_keys

    def sampling_defaults(self, limits: KeyLimits) -> dict[str, SamplingDefaults]:
        """Return the sampling defaults of the models that a key with these limits can use, by their names; '' is the
        first model."""
        return self._catalog.sampling_defaults(limits)

    async def generate(
        self, job: GenerateJob, caller: Caller, arrived_ns: int, *, admitted: bool = False
    ) -> Generation:
        """Start a job: find its model, take its places, tokenize its prompts, submit its sequences. A job takes one
        place per sequence, of the limits of the caller's key and of this router. The caller must close the generation,
        which gives the places back; if a step fails, they are given back at once, but the prompts' tokens stay charged,
        unless no tokenizer was available (see `charged`). Raises QuireError if a step fails, such as DeadlineExceeded
        at the caller's timeout. The generation raises later errors when its deltas are read.

        `arrived_ns` is the request's arrival, from `time.monotonic_ns()`. `admitted`: the job is a part of a larger
        request, such as a beam search. The caller has taken the places of this request already, charges its tokens, and
        records its metrics.
        """
        parsed_ns = time.monotonic_ns()
        check_sampling(job.sampling)
        check_request(job)
        served = self._catalog.resolve(job.model, caller.limits)
        async with within_deadline(caller, arrived_ns):
            if admitted:
                return await self._start_traced(
                    "router.step", job, caller, served, arrived_ns, parsed_ns, admitted=True
                )
            weight = job.weight
            await self._enter(caller, weight)
            try:
                return await self._start_traced("router.request", job, caller, served, arrived_ns, parsed_ns)
            except BaseException:
                self._leave(caller, weight, ran=False)
                raise

    @contextlib.asynccontextmanager
    async def admitted(self, caller: Caller, weight: int) -> AsyncIterator[None]:
        """Hold `weight` places while the `with` block lasts. The block may start several jobs, one after the other.
        Raises Overloaded if too few places are free, Unavailable while admission is paused, and InvalidArgument if
        `weight` exceeds a limit."""
        await self._enter(caller, weight)
        try:
            yield
        finally:
            self._leave(caller, weight)

    async def _start_traced(
        self,
        name: str,
        job: GenerateJob,
        caller: Caller,
        served: ServedModel,
        arrived_ns: int,
        parsed_ns: int,
        *,
        admitted: bool = False,
    ) -> Generation:
        """Start a job within a trace span of this name. The generation ends the span later; if the start fails, this
        method ends the span."""
        span = start_span(name, job, caller, served)
        try:
            return await self._start(job, caller, served, arrived_ns, parsed_ns, span, admitted=admitted)
        except BaseException as error:
            tracing.mark_error(span, error.code if isinstance(error, QuireError) else type(error).__name__)
            span.end()
            raise

    async def _start(
        self,
        job: GenerateJob,
        caller: Caller,
        served: ServedModel,
        arrived_ns: int,
        parsed_ns: int,
        span: tracing.Span,
        *,
        admitted: bool,
    ) -> Generation:
        """Encode the prompts of a job, give its first sequence the KV route that the job asks for (which may wait for a
        ticket), place its sequences, and add the generation to `live`. `generate` has found the model and taken the
        places. `arrived_ns` also sets the deadline that other services get (see `_context`). `admitted`: the job is a
        part of a larger request, which charges the tokens, counts the prompt tokens in the metrics, and gives the
        places back."""
        context = _context(caller, tracing.inject_headers(span), arrived_ns)
        started_ns = time.monotonic_ns()
        with tracing.span("router.encode", parent=tracing.context_of(span)):
            charge = _nothing if admitted else self.charge
            job, prompts, timing = await self._encode(job, served, context, charge)
            texts = await self._prompt_texts(job, prompts) if job.wants.echo else []
        encoded_ns = time.monotonic_ns()
        delta_queue = DeltaQueue[SequenceState]()
        sequences = self._make_sequences(job, caller, served, context, prompts, delta_queue)
        await self._ticket_manager.begin_route(sequences[0])
        generation = Generation(
            job,
            caller,
            served,
            sequences,
            delta_queue,
            self._token_bytes,
            self.loop_budget,
            arrived_ns,
            lambda usage: self._release(generation, usage, admitted=admitted),
            span,
            counted=not admitted,
            prompt_texts=texts,
        )
        try:
            with tracing.span("router.place", parent=tracing.context_of(span)):
                await self._place(generation, prompts)
        except BaseException:
            generation.discard()
            raise
        generation.add_timings(
            HopTiming("router", "parse", (parsed_ns - arrived_ns) // 1000),
            HopTiming("router", "tokenize", (encoded_ns - started_ns) // 1000),
            HopTiming("router", "place", (time.monotonic_ns() - encoded_ns) // 1000),
            timing,
        )
        if not admitted:
            metrics.of_model(served.model.name).prompt_tokens.inc(sum(map(len, prompts)))
        self.live.enter(generation)
        return generation

    async def _place(self, generation: Generation, prompts: list[NDArray[np.int32]]) -> None:
        """Hash long prompts for placement, and submit all sequences, prompt by prompt, the siblings of a prompt
        together. The event loop runs other tasks before a prompt with which this turn would exceed 65,536 tokens, and
        while a long prompt is hashed."""
        siblings, tokens = generation.job.siblings, 0
        for number, ids in enumerate(prompts):
            tokens += len(ids)
            if number and tokens > _TURN_TOKENS:
                tokens = len(ids)
                await asyncio.sleep(0)
            sequences = generation.sequences[number * siblings : (number + 1) * siblings]
            await name_pages(sequences, generation.served.model.pages.page_size)
            self._migration.start(sequences)
            forget_pages(sequences)

    async def render(self, job: GenerateJob, caller: Caller, arrived_ns: int) -> Rendering:
        """Check the job, find its model, tokenize its prompts and charge them as `generate` does, but take no places,
        leave the timeout to the caller, and send nothing to a replica. Returns each prompt's ids and the most tokens of
        its answer. Raises QuireError if the job is not valid, the model is unknown, or a tokenizer refuses or fails."""
        check_sampling(job.sampling)
        check_request(job)
        served = self._catalog.resolve(job.model, caller.limits)
        context = _context(caller, {}, arrived_ns)
        job, prompts, _timing = await self._encode(job, served, context, self.charge)
        limit = served.model.max_model_len
        return Rendering(job, served, tuple((ids, answer_length(job, len(ids), limit)) for ids in prompts))

    async def _encode(
        self, job: GenerateJob, served: ServedModel, context: RequestContext, charge: Charge
    ) -> tuple[GenerateJob, list[NDArray[np.int32]], HopTiming]:
        """Complete a job: tokenize its bad words and prompts, look up the thinking marks, and compile its grammar at
        last. Charge the prompts, truncate them, and check all lengths. Check that the model and the tokenizer can do
        what the job asks for.

        Returns the completed job, each prompt's ids, and the tokenizer's time. Raises QuireError if a check fails, or a
        tokenizer refuses or fails.
        """
        job = await self._resolve_words(job, context)
        if job.sampling.processors:
            check_known(job.sampling.processors, processors_in(served.model.capabilities))
        if job.structure is not None:
            check_structured(served.model.capabilities, job.structure)
        if job.thinking_tokens is not None:
            job = replace(job, thinking=await self._encoder.thinking(job.thinking_tokens))
        if job.sampling.controls is not None:
            check_vocabulary(job.sampling.controls, served.model.vocab_size)
        if job.text.parsing is not None and job.text.parsing.tool_calls:
            await self._encoder.check_tool_parser()
        limit = served.model.max_model_len
        most = 0 if job.truncate_to is not None else limit
        with charged(charge, context.tenant, job.prompts, most=most) as settle:
            encoded = await self._encoder.encode(job, context, limit - 1)
            settle(map(len, encoded.ids))
        if job.text.parsing is not None:
            parsing = replace(job.text.parsing, prompt_end=encoded.prompt_end)
            job = replace(job, text=replace(job.text, parsing=parsing))
        prompts = [truncated(job, ids, limit) for ids in encoded.ids]
        for ids in prompts:
            check_prompt(ids, served.model.vocab_size, limit)
        lengths = [len(ids) for ids in prompts]
        check_encoded(job, lengths, [answer_length(job, length, limit) for length in lengths])
        # Compiling may take seconds, so all other checks come first.
        job = await self._encoder.constrained(job, context, encoded.prompt_end)
        if job.structure is not None:
            check_structured(served.model.capabilities, job.structure, job.constraint)
        check_compiled(job)
        return job, prompts, encoded.timing

    async def _prompt_texts(self, job: GenerateJob, prompts: list[NDArray[np.int32]]) -> list[str]:
        """Return the text of each prompt, for echo. For a truncated prompt, return the text of the tokens that are
        left."""
        cut = job.truncate_to is not None
        return [
            await self._encoder.text_of(prompt, ids, cut=cut) for prompt, ids in zip(job.prompts, prompts, strict=True)
        ]

    async def _resolve_words(self, job: GenerateJob, context: RequestContext) -> GenerateJob:
        """Return the job with the token ids of its bad words added to its logit controls. Raises QuireError if the
        tokenizer fails, or `check_sampling` refuses the words."""
        if not job.bad_words:
            return job
        controls = job.sampling.controls or NEUTRAL
        words = await self._encoder.bad_words(job.bad_words, context)
        sampling = replace(job.sampling, controls=replace(controls, bad_words=(*controls.bad_words, *words)))
        check_sampling(sampling)
        return replace(job, sampling=sampling)

    def _make_sequences(
        self,
        job: GenerateJob,
        caller: Caller,
        served: ServedModel,
        context: RequestContext,
        prompts: list[NDArray[np.int32]],
        delta_queue: DeltaQueue[SequenceState],
    ) -> list[SequenceState]:
        """Make a sequence state for each sibling of each prompt, with a handle, its sample index and the seed. The seed
        is random if the job has none and samples; 0 if it has none and does not sample. KV pages are shared only
        between jobs with the same `cache_salt`, and only within a tenant, unless the router may share them across keys.

        Only a prompt's first sibling computes the prompt's logprobs, and reads no cache then. A resumed job continues
        after the client's tokens. Raises InvalidArgument for lengths or a `resume` that do not fit.
        """
        seed = random.getrandbits(63) if job.seed is None and job.sampling.temperature > 0 else job.seed or 0
        salt = job.cache_salt if self._share or not caller.tenant else f"{caller.tenant}:{job.cache_salt}"
        sampling, asked = job.sampling, job.sampling.prompt_logprobs
        eos = () if job.ignore_eos else served.model.eos_token_ids
        stop_token_ids = (*job.stop_token_ids, *eos)
        sequences: list[SequenceState] = []
        for prompt_ids in prompts:
            max_tokens = answer_length(job, len(prompt_ids), served.model.max_model_len)
            stop = Stop(max_tokens, job.min_tokens, job.stop_token_ids, job.ignore_eos, job.repetition)
            for sample in range(job.first_sample, job.first_sample + job.siblings):
                # Prompt logprobs are the same for all siblings, and the engine must compute the whole prompt for them.
                scores = asked if sample == job.first_sample else -1
                spec = Sequence(
                    prompt_ids=prompt_ids,
                    stop=stop,
                    sampling=replace(sampling, seed=seed, sample=sample, prompt_logprobs=scores),
                    cache_salt=salt,
                    skip_cache_read=scores >= 0,
                    thinking=job.thinking,
                    constraint=job.constraint,
                )
                handle = self._handles.next_handle(offsets=job.sampling.logprobs >= 0)
                sequence = SequenceState(
                    len(sequences), handle, job, spec, context, delta_queue, served.model.name, stop_token_ids
                )
                if job.resume is not None:
                    check_resume(job.resume, max_tokens, served.model.vocab_size)
                    sequence.resume_from(job.resume)
                sequences.append(sequence)
        return sequences

    def _release(self, generation: Generation, usage: Usage, *, admitted: bool) -> None:
        """Remove a closed generation from `live`, give back its places, and charge its new tokens to the tenant. With
        `admitted`, only remove it, because the larger request does the rest."""
        self.live.leave(generation, usage)
        if admitted:
            return
        self._leave(generation.caller, generation.job.weight)
        resume = generation.job.resume
        had = resume.tokens if resume is not None else 0
        self.charge(generation.caller.tenant, usage.completion_tokens - had)

    async def _enter(self, caller: Caller, weight: int) -> None:
        """Take `weight` places of the limit of the caller's key, and then of this router's own limit; take none if
        either refuses. Counts the places in the metrics, and refusals because of load (see `metrics.shed`). Raises
        Overloaded if too few places are free, Unavailable while admission is paused, and InvalidArgument if `weight`
        exceeds one of the limits."""
        limit = caller.limits.max_concurrent
        try:
            await self._concurrency.enter(caller.tenant, limit, weight)
            try:
                self._admission.enter(weight)
            except BaseException:
                self._concurrency.leave(caller.tenant, limit, weight, ran=False)
                raise
        except QuireError as error:
            metrics.shed(error, caller.tenant_name)
            raise
        metrics.in_flight.inc(weight)

    def _leave(self, caller: Caller, weight: int, *, ran: bool = True) -> None:
        """Give back `weight` places of the limit of the caller's key and of this router's own limit, and count them out
        of the metric. Without `ran`, the request failed as it started, so these places do not count in the rates for
        retry times."""
        self._concurrency.leave(caller.tenant, caller.limits.max_concurrent, weight, ran=ran)
        self._admission.leave(weight, ran=ran)
        metrics.in_flight.dec(weight)


def _context(caller: Caller, trace: Mapping[str, str], arrived_ns: int) -> RequestContext:
    """Make the context that goes to other services with a job's sequences: ids, deadline, priority and trace. The
    deadline is in seconds of the monotonic clock, infinite without a timeout of the caller. The priority is not ahead
    of the highest that the key allows. If `trace` is empty, the context has the trace headers of the caller."""
    return RequestContext(
        request_id=caller.request_id,
        tenant=caller.tenant,
        deadline_s=arrived_ns / 1e9 + caller.timeout_s if caller.timeout_s > 0 else math.inf,
        priority=max(caller.priority, caller.limits.highest_priority),
        weight=caller.limits.weight,
        traceparent=trace.get("traceparent", caller.traceparent),
        tracestate=trace.get("tracestate", caller.tracestate),
    )


def _nothing(*_: object) -> None:
    """Do nothing. Used as the charge of a job that is a part of a larger request, which charges the tokens itself."""


def check_logprobs(logprobs: int, most: int, param: str) -> None:
    """Raise Unsupported, naming the field `param`, if `logprobs` is more than `most`, the number of alternatives that
    this router returns."""
    if logprobs > most:
        raise Unsupported(
            "TOO_MANY_LOGPROBS",
            f"{param} is {logprobs}; this router gives {most} at most.",
            f"Ask for {most} or fewer, or raise --max-logprobs.",
            param=param,
        )


def check_structured(
    capabilities: Iterable[str], structure: AnswerStructure, constraint: Constraint | None = None
) -> None:
    """Raise Unsupported, naming the client's field, if no engine of the model can apply grammars. With `constraint`,
    check whether an engine can apply this compiled grammar."""
    try:
        check_capable(capabilities, constraint)
    except Unsupported as error:
        raise naming_field(error, structure) from error


def start_span(name: str, job: GenerateJob, caller: Caller, served: ServedModel) -> tracing.Span:
    """Start the span of a job, within the trace that its client sent. The calling code must end it."""
    parent = None
    if caller.traceparent:
        parent = tracing.extract_headers({"traceparent": caller.traceparent, "tracestate": caller.tracestate})
    attributes: dict[str, str | bool | int | float] = {
        "gen_ai.operation.name": "generate_content",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": served.name,
        "gen_ai.request.choice.count": job.n,
        "quire.request_id": caller.request_id,
    }
    return tracing.start_span(name, parent=parent, attributes=attributes, kind=tracing.SpanKind.SERVER)
