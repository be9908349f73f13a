"""The router's bounds on requests, as its flags set them, and the defaults of parameters: those of a model, and those
that HTTP and gRPC share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quire_common.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quire_common.credit.hello import SamplingDefaults
    from quire_router.sequences.job import GenerateJob

DEFAULT_COMPLETION_TOKENS = 16
_MAX_TOKENS, _TEMPERATURE = "max_tokens", "temperature"


@dataclass(frozen=True, slots=True)
class Limits:
    """The router's own bounds on requests."""

    max_n: int
    max_logprobs: int
    model_defaults: SamplingDefaults = ()
    """The model's own values of parameters that a body leaves out."""

    def sampling_defaults(self, body: Mapping[str, Any]) -> dict[str, float]:
        """Return the model's own defaults, by field, whether `body` has the fields or not; never max_tokens. If `body`
        asks for a beam search, only the temperature is returned, as in vLLM."""
        beams = body.get("use_beam_search") is True
        return {
            name: value
            for name, value in self.model_defaults
            if name != _MAX_TOKENS and (not beams or name == _TEMPERATURE)
        }

    @property
    def max_tokens(self) -> int | None:
        """Return the model's own limit of an answer's length, for requests without one; None: the model has none."""
        found = dict(self.model_defaults).get(_MAX_TOKENS)
        return None if found is None else int(found)


def with_best_of(job: GenerateJob, best_of: int | None, limits: Limits, *, stream: bool) -> GenerateJob:
    """Return a copy of the job with this `best_of`; `n` is unchanged. Logprobs are computed to rank the sequences, and
    the client sees them only if it asked for them. Returns the job itself if `best_of` is None or equal to n. Raises
    InvalidArgument if `best_of` is below n or above `max_n`, or if the answer is streamed."""
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
            "The best answers are known only when all have ended, but stream is set.",
            "Set stream to false.",
            param="best_of",
        )
    sampling = replace(job.sampling, logprobs=max(job.sampling.logprobs, 0))
    wants = replace(job.wants, logprobs=job.sampling.logprobs >= 0)
    return replace(job, best_of=best_of, sampling=sampling, wants=wants)
