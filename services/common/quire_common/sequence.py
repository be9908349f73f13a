"""The request for one sequence of an engine, as dataclasses: the domain form of quire.v1.SequenceSpec.

Router, scheduler and worker share it, so that a request means the same in each of them. It knows nothing of slots or
pages.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from quire.v1 import common_pb2 as pb
from quire_common.columns import NO_I32, i32, pack_i32
from quire_common.errors import InvalidArgument, TooLarge, Unsupported
from quire_common.logit_controls import LogitControls, check_controls, controls_from_pb, controls_into_pb
from quire_common.logits_processors import check_names
from quire_common.pages import PageExtras
from quire_common.repetition import RepetitionDetection, repetition_from_pb, repetition_to_pb
from quire_common.request_parameters import BY_NAME, SAMPLING_NUMBERS, NumberCodec
from quire_common.structured.constraint import Constraint, constraint_from_pb, constraint_to_pb
from quire_common.thinking import ThinkingBudget, thinking_from_pb, thinking_to_pb

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Bounds that keep a Grant of several hundred starts, and a Report of as many rows, far below what gRPC carries.
MAX_STOP_TOKEN_IDS = BY_NAME["stop_token_ids"].max_items
MAX_LOGPROBS = 256
MAX_TEXT_CHARS = 4096
MAX_WEIGHT = 1000
# 49 days, the most that the field holds.
_MAX_TIME_LEFT_MS = 2**32 - 1
_NUMBERS = NumberCodec(SAMPLING_NUMBERS)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Travels with a request through all services; see the proto. `deadline_s` is a time of this process's
    `time.monotonic()`; infinite means that there is no deadline. A message carries the remaining time instead, so that
    no service depends on another machine's clock."""

    request_id: str
    attempt: int = 0
    tenant: str = ""
    deadline_s: float = math.inf
    priority: int = 0
    traceparent: str = ""
    tracestate: str = ""
    weight: int = 1
    """The tenant's share, against those of others; 1 to MAX_WEIGHT."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The parameters by which the next token is chosen. Temperature 0 is greedy. `logprobs` and `prompt_logprobs`: -1
    requests no logprobs, 0 requests only the logprob of the token itself, and n also those of the n most likely tokens.
    `sample` is the answer's index among the n of its request."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample: int = 0
    logprobs: int = -1
    controls: LogitControls | None = None
    prompt_logprobs: int = -1
    processors: tuple[str, ...] = ()
    """Logits processors, by name."""
    typical_p: float = 1.0


@dataclass(frozen=True, slots=True)
class Stop:
    """The conditions under which a sequence ends because of its tokens. `max_tokens` counts from the first output token
    ever emitted."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition: RepetitionDetection | None = None


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence: int32 prompt ids, and the output ids that were emitted before a migration or preemption."""

    prompt_ids: NDArray[np.int32]
    stop: Stop
    sampling: Sampling = Sampling()
    output_ids: NDArray[np.int32] = field(default_factory=lambda: NO_I32)
    cache_salt: str = ""
    skip_cache_read: bool = False
    thinking: ThinkingBudget | None = None
    constraint: Constraint | None = None

    @property
    def reads_cache(self) -> bool:
        """Whether the sequence may begin on cached pages. Prompt logprobs require that all of the prompt is
        computed."""
        return not self.skip_cache_read and self.sampling.prompt_logprobs < 0

    @property
    def known_len(self) -> int:
        """Prompt and emitted tokens."""
        return len(self.prompt_ids) + len(self.output_ids)


def page_extras(sequence: Sequence) -> PageExtras:
    """Return the data, other than tokens, that distinguish the sequence's pages. Routers and schedulers both use them,
    so that they compute the same page keys."""
    return PageExtras(salt=sequence.cache_salt)


def context_to_pb(context: RequestContext) -> pb.RequestContext:
    """Domain to wire."""
    message = pb.RequestContext()
    context_into_pb(context, message)
    return message


def context_into_pb(context: RequestContext, message: pb.RequestContext) -> None:
    """Write the context into an empty message, which saves the copy that a message built apart would need. A deadline
    is written as the remaining time, 0 if it has passed; an infinite one is left out."""
    message.request_id = context.request_id
    message.attempt = context.attempt
    message.tenant = context.tenant
    if context.deadline_s < math.inf:
        message.time_left_ms = _time_left_ms(context.deadline_s)
    message.priority = context.priority
    message.traceparent = context.traceparent
    message.tracestate = context.tracestate
    if context.weight != 1:
        message.tenant_weight = context.weight


def context_from_pb(message: pb.RequestContext) -> RequestContext:
    """Decode a context. A remaining time becomes a deadline on this process's clock, and the weight is brought within 1
    to MAX_WEIGHT. Raises TooLarge for a text of more than MAX_TEXT_CHARS characters."""
    context = RequestContext(
        message.request_id,
        message.attempt,
        message.tenant,
        _deadline_s(message),
        message.priority,
        message.traceparent,
        message.tracestate,
        min(max(message.tenant_weight, 1), MAX_WEIGHT),
    )
    _check_text("request_id", context.request_id)
    _check_text("tenant", context.tenant)
    _check_text("traceparent", context.traceparent)
    _check_text("tracestate", context.tracestate)
    return context


def _time_left_ms(deadline_s: float) -> int:
    """Return the milliseconds until the deadline, rounded up and at most 2^32 - 1; 0 where the deadline has passed."""
    left_ms = math.ceil((deadline_s - time.monotonic()) * 1000)
    return min(max(left_ms, 0), _MAX_TIME_LEFT_MS)


def _deadline_s(message: pb.RequestContext) -> float:
    """Return the deadline on this process's monotonic clock; infinite if the message has none. The remaining time
    decides; a wall-clock deadline counts only if the peer sends no remaining time."""
    if message.HasField("time_left_ms"):
        return time.monotonic() + message.time_left_ms / 1000
    if message.deadline_unix_ms:
        return time.monotonic() + message.deadline_unix_ms / 1000 - time.time()
    return math.inf


def sequence_to_pb(sequence: Sequence) -> pb.SequenceSpec:
    """Domain to wire."""
    message = pb.SequenceSpec()
    sequence_into_pb(sequence, message)
    return message


def sequence_into_pb(sequence: Sequence, message: pb.SequenceSpec) -> None:
    """Write the sequence into an empty message, which saves the copy that a message built apart would need."""
    message.kind = pb.REQUEST_KIND_GENERATE
    message.inputs.add(token_ids=pack_i32(sequence.prompt_ids))
    message.output_ids = pack_i32(sequence.output_ids)
    message.cache_salt = sequence.cache_salt
    message.skip_cache_read = sequence.skip_cache_read
    if sequence.thinking is not None:
        message.thinking.CopyFrom(thinking_to_pb(sequence.thinking))
    if sequence.constraint is not None:
        message.constraint.CopyFrom(constraint_to_pb(sequence.constraint))
    _sampling_into_pb(sequence.sampling, message.sampling)
    stop, told = sequence.stop, message.stop
    told.max_tokens = stop.max_tokens
    told.min_tokens = stop.min_tokens
    told.stop_token_ids = pack_i32(stop.stop_token_ids)
    told.ignore_eos = stop.ignore_eos
    if stop.repetition is not None:
        told.repetition_detection.CopyFrom(repetition_to_pb(stop.repetition))


def _sampling_into_pb(sampling: Sampling, message: pb.SamplingParams) -> None:
    """Write the sampling parameters into an empty message. `top_p`, `seed` and `sample` are always set; other
    parameters are left out if nothing asks for them."""
    _NUMBERS.into_pb(sampling, message)
    message.seed = sampling.seed
    message.sample = sampling.sample
    if sampling.logprobs >= 0:
        message.logprobs = sampling.logprobs
    if sampling.prompt_logprobs >= 0:
        message.prompt_logprobs = sampling.prompt_logprobs
    if sampling.controls is not None:
        controls_into_pb(sampling.controls, message)
    if sampling.processors:
        message.logits_processors.extend(sampling.processors)


def sequence_from_pb(message: pb.SequenceSpec) -> Sequence:
    """Decode a sequence; segments of token ids are joined. Token ids, `max_tokens` and `min_tokens` are not checked.
    Raises InvalidArgument or TooLarge for other bad parameters, Unsupported for what the contract has room for but no
    engine does yet."""
    _refuse_unsupported(message)
    _check_text("cache_salt", message.cache_salt)
    ids = [i32(segment.token_ids, "inputs.token_ids") for segment in message.inputs]
    stop = message.stop
    return Sequence(
        prompt_ids=ids[0] if len(ids) == 1 else np.concatenate([*ids, NO_I32]),
        output_ids=i32(message.output_ids, "output_ids"),
        sampling=sampling_from_pb(message.sampling),
        stop=Stop(
            max_tokens=stop.max_tokens,
            min_tokens=stop.min_tokens,
            stop_token_ids=_stop_token_ids(stop.stop_token_ids),
            ignore_eos=stop.ignore_eos,
            repetition=repetition_from_pb(stop.repetition_detection),
        ),
        cache_salt=message.cache_salt,
        skip_cache_read=message.skip_cache_read,
        thinking=thinking_from_pb(message.thinking) if message.HasField("thinking") else None,
        constraint=constraint_from_pb(message.constraint) if message.HasField("constraint") else None,
    )


def sampling_from_pb(message: pb.SamplingParams) -> Sampling:
    """Decode and check the sampling parameters. Raises InvalidArgument or TooLarge, which name the parameter, as
    `check_sampling` does."""
    check_names(message.logits_processors)  # before a tuple of millions is made
    sampling = Sampling(
        **_NUMBERS.from_pb(message),
        seed=message.seed,
        sample=message.sample,
        logprobs=message.logprobs if message.HasField("logprobs") else -1,
        controls=controls_from_pb(message),
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else -1,
        processors=tuple(message.logits_processors),
    )
    check_sampling(sampling)
    return sampling


def check_sampling(sampling: Sampling) -> None:
    """Raise InvalidArgument for a number outside its range, which NaN always is, a seed that is no unsigned 64-bit
    integer, or bad controls. Raise TooLarge for more than MAX_LOGPROBS logprobs or prompt logprobs, or too many logits
    processors."""
    for name, asked in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if asked > MAX_LOGPROBS:
            raise TooLarge(
                "TOO_MANY_LOGPROBS",
                f"{asked} alternatives per token, at most {MAX_LOGPROBS} are possible.",
                "Ask for fewer.",
                param=name,
            )
    _NUMBERS.check(sampling)
    if not 0 <= sampling.seed < 2**64:
        raise InvalidArgument(
            "BAD_SAMPLING_PARAMETER",
            f"seed is {sampling.seed}.",
            "Choose a value an unsigned 64-bit integer.",
            param="seed",
        )
    if sampling.controls is not None:
        check_controls(sampling.controls)
    check_names(sampling.processors)


def unsupported(name: str, circumstances: str = "") -> Unsupported:
    """Return the error for a known parameter that no engine of this version implements, at all or in these
    `circumstances`."""
    called = name + circumstances
    return Unsupported(
        "PARAMETER_UNSUPPORTED",
        f"{called} is not supported by this version of Quire.",
        f"Leave {called} out.",
        param=name,
    )


def _stop_token_ids(column: bytes) -> tuple[int, ...]:
    """Decode the stop token ids. Raises TooLarge for more than MAX_STOP_TOKEN_IDS, InvalidArgument for a number of
    bytes that is no multiple of four."""
    ids = i32(column, "stop_token_ids")
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise TooLarge(
            "TOO_MANY_STOP_IDS",
            f"{len(ids)} stop token ids, at most {MAX_STOP_TOKEN_IDS} are possible.",
            "Send fewer.",
            param="stop_token_ids",
        )
    return tuple(ids.tolist())


def _check_text(name: str, text: str) -> None:
    """Raise TooLarge for a text of more than MAX_TEXT_CHARS characters; `name` is its field."""
    if len(text) > MAX_TEXT_CHARS:
        raise TooLarge(
            "TEXT_TOO_LONG",
            f"{name} has {len(text)} characters, at most {MAX_TEXT_CHARS} are possible.",
            "Send a shorter one.",
            param=name,
        )


def _refuse_unsupported(message: pb.SequenceSpec) -> None:
    """Raise Unsupported for what no engine does yet: a kind of request other than generation, an adapter, or an input
    other than token ids."""
    if message.kind not in (pb.REQUEST_KIND_UNSPECIFIED, pb.REQUEST_KIND_GENERATE):
        raise unsupported("kind")
    if message.HasField("adapter"):
        raise unsupported("adapter")
    for segment in message.inputs:
        if segment.WhichOneof("segment") != "token_ids":
            raise unsupported("media")
