"""Collects the whole answers of a job, and chooses the n best of each prompt's siblings. The best answers are those
with the highest mean logprob per token, as in OpenAI's API. Siblings are the sequences of one prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_router.requests.generation import Generation
    from quire_router.sequences.delta import Delta
    from quire_router.sequences.job import GenerateJob


async def whole_answers(generation: Generation) -> list[Delta]:
    """Wait for the end of a job that is not streamed, so that each sequence has one delta. Returns the deltas of the n
    best answers of each prompt, numbered anew. Raises the QuireError that ended the job."""
    deltas: dict[int, Delta] = {}
    while generation.running:
        for delta in await generation.next_deltas():
            deltas[delta.index] = delta
    return best_of(generation.job, [deltas[index] for index in sorted(deltas)])


def best_of(job: GenerateJob, deltas: Sequence[Delta]) -> list[Delta]:
    """Return the n answers of each prompt with the highest mean logprob per token, best first and numbered anew. An
    answer without logprobs has the mean 0, and equal answers stay in their order. `deltas` are whole answers in the
    order of their indices. If each prompt has just n answers, they are returned unchanged."""
    if job.siblings == job.n:
        return list(deltas)
    found = []
    for prompt in range(len(job.prompts)):
        siblings = deltas[prompt * job.siblings : (prompt + 1) * job.siblings]
        ranked = sorted(siblings, key=_score, reverse=True)[: job.n]
        found += [replace(delta, index=prompt * job.n + i) for i, delta in enumerate(ranked)]
    return found


def _score(delta: Delta) -> float:
    return sum(entry.logprob for entry in delta.entries) / max(1, len(delta.entries))
