"""A router's own bounds on requests, as its flags set them, and the defaults that HTTP and gRPC share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire_common.errors import InvalidArgument

if TYPE_CHECKING:
    from quire_router.sequences.job import GenerateJob

DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """The router's own bounds on requests."""

    max_n: int
    max_logprobs: int


def of_many(job: GenerateJob, best_of: int | None, limits: Limits, *, stream: bool) -> GenerateJob:
    """Return the job that runs `best_of` sequences per prompt, with the logprobs by which the best are found; unchanged
    where `best_of` is None or n. Raises InvalidArgument where it is out of range or the answer is streamed."""
    if best_of is None or best_of == job.n:
        return job
    if not job.n < best_of <= limits.max_n:
        raise InvalidArgument(
            "OUT_OF_RANGE",
            f"best_of is {best_of}, n is {job.n}.",
            f"Choose a best_of from n to {limits.max_n}.",
            param="best_of",
        )
    if stream:
        raise InvalidArgument(
            "STREAM_ON",
            "Which are the best of several is known when all have ended, and stream is set.",
            "Set stream to false.",
            param="best_of",
        )
    sampling = replace(job.sampling, logprobs=max(job.sampling.logprobs, 0))
    wants = replace(job.wants, logprobs=job.sampling.logprobs >= 0)
    return replace(job, best_of=best_of, sampling=sampling, wants=wants)
