"""Converts requests of vllm.grpc.engine to jobs and to request ids. Features that Quire does not support are refused by
name, and never ignored.

Lists are counted before they are converted, because a message of 4 MiB can have millions of entries. While a long
prompt is converted, the event loop runs other tasks from time to time.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from quire_common.errors import InvalidArgument
from quire_common.logit_controls import NEUTRAL, LogitControls, check_counts
from quire_common.request_parameters import PENALTIES, SAMPLING_NUMBERS, Parameter
from quire_common.sequence import Sampling, unsupported
from quire_router.front.parameters.tables import MAX_STOP_CHARS, MAX_STOP_IDS, MAX_STOP_STRINGS
from quire_router.requests.lengths import check_prompt_length
from quire_router.requests.pipeline import check_logprobs
from quire_router.sequences.job import GenerateJob, TextOptions, TextPrompt, TokenPrompt, Wants
from quire_router.sequences.structured import StructuredOutput

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray
    from smg_grpc_proto.generated import vllm_engine_pb2 as vb

    from quire_router.front.parameters.request_limits import Limits

# One Abort names at most so many requests: far more than run at once.
MAX_ABORTED = 16_384
_MAX_ID = 2**31 - 1
# Token ids that are converted at a stretch: some 5 ms.
_TURN_TOKENS = 65_536


async def parse_generate(request: vb.GenerateRequest, limits: Limits, max_model_len: int) -> GenerateJob:
    """Check SMG's GenerateRequest and convert it to a job for a model of this context length in tokens. Where proto3
    cannot tell a number 0 from unset, 0 means vLLM's default; an unset flag is false, and a negative seed means none.
    The job always returns token ids. Raises Unsupported for media, KV transfer, a data-parallel rank above 0, and a
    negative number of logprobs or one above the limit. Raises InvalidArgument for `n`, `max_tokens`, stop strings,
    token ids or a count of biases out of bounds, a missing prompt, token ids that fill the context and are not to be
    truncated, and `ignore_eos` with a structure. The ranges of the sampling numbers are checked later, by the
    pipeline."""
    _refuse_unsupported(request)
    params = request.sampling_params
    logprobs = _logprobs(params, "logprobs", limits)
    prompt_logprobs = _logprobs(params, "prompt_logprobs", limits)
    n = params.n or 1
    if n > limits.max_n:
        raise InvalidArgument("OUT_OF_RANGE", f"n is {n}.", f"Choose from 1 to {limits.max_n}.", param="n")
    max_tokens = params.max_tokens if params.HasField("max_tokens") else None
    if max_tokens is not None and not 1 <= max_tokens <= _MAX_ID:
        raise InvalidArgument("OUT_OF_RANGE", f"max_tokens is {max_tokens}.", "Give at least 1.", param="max_tokens")
    if len(params.stop) > MAX_STOP_STRINGS or any(not 0 < len(stop) <= MAX_STOP_CHARS for stop in params.stop):
        raise InvalidArgument(
            "TOO_MANY_ITEMS",
            f"stop has {len(params.stop)} strings, or one that is empty or too long.",
            f"Send at most {MAX_STOP_STRINGS} of 1 to {MAX_STOP_CHARS} characters.",
            param="stop",
        )
    if len(params.stop_token_ids) > MAX_STOP_IDS or any(token > _MAX_ID for token in params.stop_token_ids):
        raise InvalidArgument(
            "TOO_MANY_ITEMS",
            "stop_token_ids has too many items, or items that are not token ids.",
            f"Send {MAX_STOP_IDS} at most.",
            param="stop_token_ids",
        )
    truncate_to = params.truncate_prompt_tokens if params.HasField("truncate_prompt_tokens") else None
    controls = _controls(params)
    prompt = await _prompt(request, max_model_len, truncates=truncate_to is not None)
    return GenerateJob(
        model="",
        prompts=(prompt,),
        n=n,
        sampling=Sampling(
            **_numbers(params, SAMPLING_NUMBERS),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            controls=controls,
        ),
        seed=params.seed if params.HasField("seed") and params.seed >= 0 else None,
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        structure=_structure(params),
        truncate_to=truncate_to,
        text=TextOptions(
            stop=tuple(params.stop),
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        ),
        wants=Wants(stream=request.stream, every_token=request.stream, token_ids=True, prompt_logprobs=prompt_logprobs),
    )


def _numbers(params: vb.SamplingParams, parameters: Iterable[Parameter]) -> dict[str, Any]:
    """Return, by name, the values of those parameters that are fields of vLLM's message. A field that is not set has
    the parameter's default; 0 counts as not set if proto3 cannot tell the difference."""
    found = {}
    for name, default in ((each.name, each.default) for each in parameters):
        field = params.DESCRIPTOR.fields_by_name.get(name)
        if field is not None:
            value = getattr(params, name)
            said = params.HasField(name) if field.has_presence else value
            found[name] = value if said else default
    return found


def _controls(params: vb.SamplingParams) -> LogitControls | None:
    """Return the request's penalties and biases; None if they change nothing. Raises InvalidArgument for too many
    biases."""
    check_counts(len(params.logit_bias))
    controls = LogitControls(
        **_numbers(params, PENALTIES),
        logit_bias=tuple(sorted(params.logit_bias.items())),
    )
    return None if controls == NEUTRAL else controls


def _structure(params: vb.SamplingParams) -> StructuredOutput | None:
    """Return the structure that the answer must match: a schema, regular expression, grammar, structural tag, choice or
    any JSON object. None if the request has none. Raises InvalidArgument if `ignore_eos` is set too."""
    kind = params.WhichOneof("constraint")
    if kind is None or (kind == "json_object" and not params.json_object):
        return None
    if params.ignore_eos:
        raise InvalidArgument(
            "CONTRADICTION",
            f"{kind} says where the answer ends, and ignore_eos that it does not end there.",
            "Leave ignore_eos out.",
            param="ignore_eos",
        )
    if kind == "json_object":
        return StructuredOutput(kind, param=kind)
    text = json.dumps(list(params.choice.choices)) if kind == "choice" else getattr(params, kind)
    return StructuredOutput(kind, text, param=kind)


async def _prompt(request: vb.GenerateRequest, max_model_len: int, *, truncates: bool) -> TextPrompt | TokenPrompt:
    """Convert the request's text or token ids to a prompt. Only the last `max_model_len` ids are converted, since a
    longer list is accepted only if the prompt `truncates`. Raises InvalidArgument if neither is set, a converted id is
    not an int32, or untruncated ids fill the context; the length of a text is not checked."""
    kind = request.WhichOneof("input")
    if kind == "text":
        return TextPrompt(request.text)
    if kind == "tokenized":
        given = request.tokenized.input_ids
        if not truncates:
            check_prompt_length(len(given), max_model_len)
        ids = await _converted(given, max(0, len(given) - max_model_len))
        if len(ids) and int(ids.max()) > _MAX_ID:
            raise InvalidArgument(
                "TOKEN_OUT_OF_RANGE",
                "input_ids has an item that is not a token id.",
                "Send token ids.",
                param="input_ids",
            )
        return TokenPrompt(ids.astype(np.int32))
    raise InvalidArgument("MISSING_FIELD", "The input is missing.", "Set tokenized or text.", param="input")


async def _converted(given: Sequence[int], start: int) -> NDArray[np.int64]:
    """Convert the ids of `given` from index `start` on to an int64 array. After every 65,536 ids, the event loop runs
    other tasks."""
    parts = [np.empty(0, np.int64)]
    for at in range(start, len(given), _TURN_TOKENS):
        if at > start:
            await asyncio.sleep(0)
        parts.append(np.array(given[at : at + _TURN_TOKENS], np.int64))
    return np.concatenate(parts)


def aborted_ids(request: vb.AbortRequest) -> set[str]:
    """Return the set of the ids of the requests to abort. Raises InvalidArgument for more than 16,384 ids."""
    if len(request.request_ids) > MAX_ABORTED:
        raise InvalidArgument(
            "TOO_MANY_ITEMS",
            f"request_ids has {len(request.request_ids)} items; the limit is {MAX_ABORTED}.",
            f"Send at most {MAX_ABORTED} items.",
            param="request_ids",
        )
    return set(request.request_ids)


def _logprobs(params: vb.SamplingParams, name: str, limits: Limits) -> int:
    """Return the number of logprobs in field `name`, or -1 (none) if it is not set. Raises Unsupported for a number
    above the limit, and for a negative number, which means the whole vocabulary in vLLM."""
    if not params.HasField(name):
        return -1
    count: int = getattr(params, name)
    if count < 0:
        raise unsupported(name, ": -1")
    check_logprobs(count, limits.max_logprobs, name)
    return count


def _refuse_unsupported(request: vb.GenerateRequest) -> None:
    """Raise Unsupported, naming the field, for media, KV transfer and a data-parallel rank above 0. A
    `kv_transfer_params_json` of '', '{}' or 'null' is accepted; the message `kv_transfer_params` never is."""
    for name in ("mm_inputs", "media_refs", "kv_transfer_params"):
        if request.HasField(name):
            raise unsupported(name)
    if request.extra_mm_inputs:
        raise unsupported("extra_mm_inputs")
    if request.kv_transfer_params_json not in ("", "{}", "null"):
        raise unsupported("kv_transfer_params_json")
    if request.data_parallel_rank > 0:
        raise unsupported("data_parallel_rank")
