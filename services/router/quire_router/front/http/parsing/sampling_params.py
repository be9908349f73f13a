"""Converts vLLM's `sampling_params` object in both directions: /inference/v1/generate takes it, and the render routes
return it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire_common.logit_controls import NEUTRAL
from quire_common.request_parameters import LIMITS, PENALTIES
from quire_common.sequence import unsupported
from quire_router.front.http.parsing.parse import ParsedRequest, job_request
from quire_router.front.http.parsing.prompts import required, token_prompt
from quire_router.front.http.parsing.structured_fields import structured_outputs_of
from quire_router.front.parameters.fields import check_fields
from quire_router.front.parameters.request_limits import DEFAULT_COMPLETION_TOKENS
from quire_router.front.parameters.tables import EXTRA_ARGS, GENERATE, SAMPLING, SAMPLING_PARAMS
from quire_router.sequences.structured import RequiredTools

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quire_router.front.parameters.request_limits import Limits
    from quire_router.sequences.job import GenerateJob


def parse_tokens(body: Mapping[str, Any], limits: Limits, *, timings: bool) -> ParsedRequest:
    """Check a body of /inference/v1/generate, whose prompt and answer are token ids, and convert it to a job. Fields of
    the request, such as `stream` or `priority`, belong in the body and not in `sampling_params`. If the body has no
    `kv_transfer_params`, those in `extra_args` of `sampling_params` count. Without `max_tokens`, the answer has at most
    16 tokens. The model's own sampling defaults do not apply. Raises InvalidArgument for missing, unknown, wrong or
    contradicting fields, and Unsupported for fields that Quire lacks and for more logprobs than the router returns.
    `timings`: the client wants timings in the answer."""
    outer = check_fields(body, GENERATE)
    values = {
        **check_fields({}, SAMPLING),
        **check_fields(required(outer, "sampling_params"), SAMPLING_PARAMS),
        **outer,
    }
    if values["kv_transfer_params"] is None:
        values["kv_transfer_params"] = check_fields(values["extra_args"] or {}, EXTRA_ARGS)["kv_transfer_params"]
    return job_request(
        values,
        limits,
        prompts=(token_prompt(required(outer, "token_ids"), "token_ids"),),
        logprobs=-1 if values["logprobs"] is None else values["logprobs"],
        logprobs_param="sampling_params.logprobs",
        max_tokens=values["max_tokens"],
        default_max_tokens=DEFAULT_COMPLETION_TOKENS,
        timings=timings,
        token_ids=True,
    )


def sampling_params_of(job: GenerateJob, max_tokens: int) -> dict[str, Any]:
    """Return the `sampling_params` of a job with this limit of its answer. `max_tokens` and `temperature` are always
    there; other values at their defaults are left out. `parse_tokens` converts them back to the same sampling. Raises
    Unsupported for best_of, for a max_tokens of 0, and if tools demand a structure (a tool_choice that forces a call,
    or strict tools), because the object cannot express them."""
    if job.best_of > 1:
        raise unsupported("best_of", " in a request that is rendered")
    if job.prompt_only:
        raise unsupported("max_tokens", " of 0 in a request that is rendered")
    sampling, controls, text, rule = job.sampling, job.sampling.controls or NEUTRAL, job.text, job.repetition
    every: dict[str, tuple[Any, Any]] = {
        "n": (job.n, 1),
        "max_tokens": (max_tokens, None),
        "min_tokens": (job.min_tokens, 0),
        "temperature": (sampling.temperature, None),
        **{each.name: (getattr(sampling, each.name), each.default) for each in LIMITS},
        "seed": (job.seed, None),
        "logprobs": (sampling.logprobs, -1),
        "prompt_logprobs": (job.wants.prompt_logprobs, -1),
        **{each.name: (getattr(controls, each.name), each.default) for each in PENALTIES},
        "logit_bias": ({str(token): bias for token, bias in controls.logit_bias}, {}),
        "allowed_token_ids": (list(controls.allowed_token_ids), []),
        "bad_words": (list(job.bad_words), []),
        "stop": (list(text.stop), []),
        "stop_token_ids": (list(job.stop_token_ids), []),
        "include_stop_str_in_output": (text.include_stop_str_in_output, False),
        "ignore_eos": (job.ignore_eos, False),
        "logits_processors": (list(sampling.processors), []),
        "thinking_token_budget": (job.thinking_tokens, None),
        "use_beam_search": (job.beams, False),
        "length_penalty": (job.length_penalty, 1.0),
        "return_tokens_as_token_ids": (job.wants.tokens_by_id, False),
        "skip_special_tokens": (text.skip_special_tokens, True),
        "spaces_between_special_tokens": (text.spaces_between_special_tokens, True),
        "repetition_detection": (
            rule
            and {
                "max_pattern_size": rule.max_pattern_size,
                "min_pattern_size": rule.min_pattern_size,
                "min_count": rule.min_count,
            },
            None,
        ),
    }
    if isinstance(job.structure, RequiredTools):
        asked = " that forces a call," if job.structure.required else "[].function.strict"
        raise unsupported(job.structure.param, f"{asked} in a request that is rendered")
    if job.structure is not None:
        every["structured_outputs"] = structured_outputs_of(job.structure), None
    return {name: value for name, (value, neutral) in every.items() if value != neutral}
