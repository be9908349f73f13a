"""Beam search, with the algorithm of vLLM. The router runs it over logprobs: for each step of the search, it starts a
job that generates one token for every beam.

The engine gets ordinary short requests whose prompts have the same beginning. So its prefix cache has all pages of
these prompts except the last ones. The requests can also migrate to another replica, like all others. The result is a
Generation that has ended, and one delta for each beam of the answer. This module knows nothing of formats.
"""

from __future__ import annotations

import asyncio
import time
from codecs import getincrementaldecoder
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from quire_common.columns import pack_i32
from quire_common.logit_controls import NEUTRAL
from quire_common.sequence import MAX_LOGPROBS, Sampling, unsupported
from quire_common.telemetry import tracing
from quire_router import metrics
from quire_router.off_loop import MOST_VALUES, off_loop
from quire_router.requests.beams import Search
from quire_router.requests.deadline import within_deadline
from quire_router.requests.generation import Generation
from quire_router.requests.pipeline import start_span
from quire_router.sequences.delta import FINISH_NAMES, LENGTH, STOP, Delta, Usage
from quire_router.sequences.delta_queue import DeltaQueue
from quire_router.sequences.job import GenerateJob, TextOptions, TokenPrompt, Wants
from quire_router.sequences.logprob_entries import unpack_entry

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from quire_router.requests.beams import Beam
    from quire_router.requests.encoder import Encoder
    from quire_router.requests.pipeline import Pipeline, Rendering
    from quire_router.sequences.delta import LogprobEntry
    from quire_router.sequences.job import Caller
    from quire_router.text.token_bytes import TokenBytes


# Bytes of each alternative in a packed entry: an id and its logprob.
_VALUE_BYTES = 8


@dataclass(slots=True)
class _Costs:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class SearchedGeneration(Generation):
    """A whole search as one generation, for the formats and for the metrics at its end. `searches` has, for each
    prompt, its token ids and its best beams. `first_ns` is the time of the first token."""

    searches: Sequence[tuple[NDArray[np.int32], Sequence[Beam]]] = ()
    costs: _Costs
    first_ns = 0

    def usage(self) -> Usage:
        """Return the tokens used. Each prompt counts once, and only the answers that the client gets count."""
        return Usage(self.costs.prompt_tokens, self.costs.completion_tokens, self.costs.cached_tokens)

    def prompt_ids(self, index: int) -> NDArray[np.int32]:
        return self.searches[index // self.job.n][0]

    def _first_ns(self) -> int:
        return self.first_ns

    def _reasons(self) -> list[str]:
        """Return the finish reason of each answer; `abort` for all answers if the search has not ended."""
        reasons = [FINISH_NAMES[_finish(beam)] for _, beams in self.searches for beam in beams]
        return reasons or ["abort"] * self.answer_count


class BeamSearch:
    """Runs beam searches; `run` is the only public method."""

    def __init__(self, pipeline: Pipeline, encoder: Encoder, token_bytes: TokenBytes) -> None:
        self._pipeline = pipeline
        self._encoder = encoder
        self._token_bytes = token_bytes

    async def run(self, job: GenerateJob, caller: Caller, arrived_ns: int) -> tuple[Generation, list[Delta]]:
        """Find the n best beams of each prompt. Returns a generation that has ended, and one delta for each beam, by
        prompt, best first. The search takes places until it ends, and charges tokens. Raises Unsupported for options
        that beam search does not honour, DeadlineExceeded at the caller's timeout, and the QuireErrors of
        `Pipeline.admitted`, `render` and `generate`."""
        check_beams(job)
        async with within_deadline(caller, arrived_ns), self._pipeline.admitted(caller, job.weight):
            rendering = await self._pipeline.render(job, caller, arrived_ns)
            return await self._run(rendering, caller, arrived_ns)

    async def _run(self, rendering: Rendering, caller: Caller, arrived_ns: int) -> tuple[Generation, list[Delta]]:
        """Count the prompts' tokens in the metrics, and search, within a trace span of its own. The caller has taken
        the places and applies the timeout. At the end, also after an error, the generation is closed, which charges the
        answers' tokens and records the metrics."""
        job, costs = rendering.job, _Costs(sum(len(ids) for ids, _ in rendering.prompts))
        metrics.of_model(rendering.served.model.name).prompt_tokens.inc(costs.prompt_tokens)
        span = start_span("router.beams", job, caller, rendering.served)
        timeless = replace(caller, timeout_s=0.0)  # `run` applies the timeout
        generation = SearchedGeneration(
            job,
            timeless,
            rendering.served,
            (),
            DeltaQueue(),
            self._token_bytes,
            self._pipeline.loop_budget,
            arrived_ns,
            lambda usage: self._pipeline.charge(caller.tenant, usage.completion_tokens),
            span,
        )
        generation.costs = costs
        try:
            headers = tracing.inject_headers(span)
            if headers:
                caller = replace(caller, traceparent=headers["traceparent"], tracestate=headers.get("tracestate", ""))
            deltas = await self._search(generation, rendering, caller, arrived_ns)
        finally:
            generation.close()
        return generation, deltas

    async def _search(
        self, generation: SearchedGeneration, rendering: Rendering, caller: Caller, arrived_ns: int
    ) -> list[Delta]:
        """Grow the beams of all prompts step by step, one token each, until no beam is live. Stores the best beams and
        the token counts in `generation`, with the prompts' texts for echo. Returns a delta for each of the n best beams
        of each prompt."""
        job, costs = rendering.job, generation.costs
        eos = () if job.ignore_eos else rendering.served.model.eos_token_ids
        end_ids = np.array((*job.stop_token_ids, *eos), np.int32)
        searches = [Search(ids, most) for ids, most in rendering.prompts]
        best: list[list[Beam]] = []
        while any(search.live for search in searches):
            live = [search for search in searches if search.live]
            await self._step(job, caller, arrived_ns, live, end_ids, costs)
            generation.first_ns = generation.first_ns or time.monotonic_ns()
            best = [search.best(job) for search in searches]
            # The tokens so far are counted after each step, because an error may end the search at any step.
            costs.completion_tokens = sum(len(beam.ids) for beams in best for beam in beams)
        generation.searches = [(search.prompt_ids, beams) for search, beams in zip(searches, best, strict=True)]
        if job.wants.echo:
            prompts = zip(job.prompts, searches, strict=True)
            cut = job.truncate_to is not None
            texts = [await self._encoder.text_of(p, s.prompt_ids, cut=cut) for p, s in prompts]
            generation.set_prompt_texts(texts)
        kept = enumerate(beam for beams in best for beam in beams)
        return [await self._delta(job, i, beam, caller.tenant) for i, beam in kept]

    async def _step(
        self,
        job: GenerateJob,
        caller: Caller,
        arrived_ns: int,
        searches: list[Search],
        end_ids: NDArray[np.int32],
        costs: _Costs,
    ) -> None:
        """Run one job that generates the next token of every live beam with its `2 * n` likeliest tokens, and grow the
        searches by these. The job may take the time that the whole request has left. Changes `searches`, and after the
        first step the cached tokens of `costs`. Raises the QuireError that ended the job or kept it from starting."""
        await asyncio.sleep(0)  # a step of many beams is built in its own turn of the event loop
        beams = [(search, beam) for search in searches for beam in search.live]
        step = GenerateJob(
            model=job.model,
            prompts=tuple(TokenPrompt(np.append(s.prompt_ids, beam.ids)) for s, beam in beams),
            sampling=Sampling(logprobs=2 * job.n),
            seed=0,
            max_tokens=1,
            ignore_eos=True,
            text=TextOptions(),
            cache_salt=job.cache_salt,
            session=job.session,
            wants=Wants(logprobs=False),  # only the search reads the logprobs, and it needs no bytes of tokens
        )
        generation = await self._pipeline.generate(step, caller, arrived_ns, admitted=True)
        try:
            entries: dict[int, LogprobEntry] = {}
            while generation.running:
                for delta in await generation.next_deltas():
                    entries[delta.index] = delta.entries[0]
            if not costs.cached_tokens and not len(beams[0][1].ids):
                costs.cached_tokens = generation.usage().cached_tokens
        finally:
            generation.close()
        following = iter(entries[i] for i in range(len(beams)))
        for search in searches:
            await asyncio.sleep(0)  # between the prompts, the event loop runs other tasks
            search.grow([next(following) for _ in search.live], job, end_ids)

    async def _delta(self, job: GenerateJob, index: int, beam: Beam, tenant: str) -> Delta:
        """Make the delta of a beam, with its text (decoded by a tokenizer), all its ids and its finish reason. The text
        is without the end token, unless the job includes stop strings. The stop reason is the end token if the job, and
        not only the model, names it. The delta has logprobs if the job asks for them. `index` is the number of the
        answer."""
        stop_id = int(beam.ids[-1]) if beam.stopped else None
        shown = beam.ids[:-1] if beam.stopped and not job.text.include_stop_str_in_output else beam.ids
        text = ""
        if len(shown):
            text = await self._encoder.decode(shown, skip_special_tokens=job.text.skip_special_tokens)
        wanted = job.sampling.logprobs >= 0
        entries, offsets = await self._logprobs(beam, len(text), tenant) if wanted else ([], [])
        reason = stop_id if stop_id in job.stop_token_ids else None
        return Delta(index, text, len(beam.ids), pack_i32(beam.ids), entries, offsets, _finish(beam), reason)

    async def _logprobs(self, beam: Beam, characters: int, tenant: str) -> tuple[list[LogprobEntry], list[int]]:
        """Return a beam's logprob entries, and the character offset after each of its tokens, at most `characters`, the
        length of the text; fetch the bytes of all tokens in the entries. If the beam is long, a thread does the
        work."""
        heavy = sum(map(len, beam.entries)) > MOST_VALUES * _VALUE_BYTES
        aside = partial(off_loop, heavy=heavy, tenant=tenant)
        entries = await aside(lambda: list(map(unpack_entry, beam.entries)))
        ids = await aside(lambda: {i for entry in entries for i in (entry.token_id, *entry.top_ids)})
        await self._token_bytes.ensure(ids)
        pieces = list(map(self._token_bytes.get, beam.ids.tolist()))
        return entries, await aside(lambda: character_offsets(pieces, characters))


def character_offsets(pieces: Iterable[bytes], most: int) -> list[int]:
    """Return, for each piece of a UTF-8 text, the number of whole characters from the beginning of the text to the end
    of the piece, `most` at most. Bytes that are not UTF-8 do not count."""
    decoder, found, count = getincrementaldecoder("utf-8")("ignore"), list[int](), 0
    for piece in pieces:
        count += len(decoder.decode(piece))
        found.append(min(count, most))
    return found


def check_beams(job: GenerateJob) -> None:
    """Raise Unsupported, naming the field, for a job with options that beam search does not honour, or with an n above
    half of the most logprobs."""
    asked = {
        **_controls_of(job),
        "stop": job.text.stop,
        "best_of": job.best_of > 1,
        "min_tokens": job.min_tokens,
        "bad_words": job.bad_words,
        "repetition_detection": job.repetition,
        "logits_processors": job.sampling.processors,
        "thinking_token_budget": job.thinking_tokens is not None,
        "prompt_logprobs": job.sampling.prompt_logprobs >= 0,
        "structured_outputs": job.structure is not None,
        "stream": job.wants.stream,
    }
    for name, value in asked.items():
        if value:
            raise unsupported(name, " with use_beam_search")
    if 2 * job.n > MAX_LOGPROBS:
        raise unsupported("n", f" above {MAX_LOGPROBS // 2} with use_beam_search")


def _controls_of(job: GenerateJob) -> dict[str, bool]:
    """Return, for each logit control (penalties, biases, allowed tokens) by its name, whether the job uses it."""
    controls = job.sampling.controls or NEUTRAL
    return {each.name: getattr(controls, each.name) != getattr(NEUTRAL, each.name) for each in fields(controls)}


def _finish(beam: Beam) -> int:
    return STOP if beam.stopped else LENGTH
