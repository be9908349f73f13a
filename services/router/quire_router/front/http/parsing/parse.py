"""Converts JSON bodies to jobs. The parser is hand-written: there are no model classes, but one table of fields, and
one error per mistake."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quire_common.errors import InvalidArgument
from quire_common.request_parameters import SAMPLING_NUMBERS, NumberCodec, check_fields_above_low
from quire_common.sequence import Sampling
from quire_router.front.http.parsing.control_fields import controls_of, repetition_of
from quire_router.front.http.parsing.kv_transfer_fields import check_export, with_kv_transfer
from quire_router.front.http.parsing.prompts import messages_of, prompts_of
from quire_router.front.http.parsing.structured_fields import structure_of
from quire_router.front.parameters.fields import check_fields, json_text
from quire_router.front.parameters.request_limits import DEFAULT_COMPLETION_TOKENS, with_best_of
from quire_router.front.parameters.tables import CHAT, COMPLETION, MAX_ID_CHARS, STREAM_OPTIONS
from quire_router.front.parameters.tool_fields import demanded_calls, parsing_of, tools_of
from quire_router.requests.beam_search import check_beams
from quire_router.requests.pipeline import check_logprobs
from quire_router.sequences.job import ChatPrompt, GenerateJob, Parsing, Prompt, TextOptions, Wants

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quire_router.front.parameters.request_limits import Limits
    from quire_router.sequences.structured import RequiredTools, StructuredOutput

_NUMBERS = NumberCodec(SAMPLING_NUMBERS)


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A job, and the options of its answer."""

    job: GenerateJob
    stream: bool
    include_usage: bool
    continuous_usage: bool
    request_id: str | None
    priority: int
    timeout_s: float = 0.0


def parse_completion(body: Mapping[str, Any], limits: Limits, *, timings: bool) -> ParsedRequest:
    """Check a body of /v1/completions and convert it to a job with one prompt or several. A `max_tokens` of 0 means the
    prompt alone, without an answer; without `max_tokens`, an answer has at most 16 tokens. Raises InvalidArgument for
    unknown, wrong or contradicting fields, such as `best_of` or a KV export in a stream, and Unsupported for fields
    that Quire lacks and for more logprobs than the router returns. `timings`: the client wants timings in the
    answer."""
    values = check_fields(body, COMPLETION, limits.sampling_defaults(body))
    logprobs = -1 if values["logprobs"] is None else values["logprobs"]
    parsed = job_request(
        values,
        limits,
        prompts=prompts_of(values["prompt"]),
        logprobs=logprobs,
        logprobs_param="logprobs",
        max_tokens=1 if values["max_tokens"] == 0 else values["max_tokens"],
        default_max_tokens=DEFAULT_COMPLETION_TOKENS,
        timings=timings,
        echo=values["echo"],
        add_special_tokens=values["add_special_tokens"],
    )
    job = parsed.job
    if values["max_tokens"] == 0:
        job = replace(job, prompt_only=True)
    job = with_best_of(job, values["best_of"], limits, stream=parsed.stream)
    if job.kv_export:
        check_export(job, stream=parsed.stream)
    return parsed if job is parsed.job else replace(parsed, job=job)


def parse_chat(body: Mapping[str, Any], limits: Limits, *, timings: bool) -> ParsedRequest:
    """Check a body of /v1/chat/completions and convert it to a job of one conversation. `max_completion_tokens` takes
    precedence over `max_tokens`. Without both, the model's own limit counts or, if it has none, the context's room.
    Raises InvalidArgument for unknown, wrong or contradicting fields, such as `top_logprobs` without `logprobs`, and
    Unsupported for fields and content that Quire lacks and for more logprobs than the router returns. `timings`: the
    client wants timings in the answer."""
    values = check_fields(body, CHAT, limits.sampling_defaults(body))
    top = values["top_logprobs"]
    if top and not values["logprobs"]:
        raise InvalidArgument(
            "LOGPROBS_OFF", "top_logprobs is set, but logprobs is not.", "Set logprobs to true.", param="top_logprobs"
        )
    prompt = chat_prompt(values, body)
    return job_request(
        values,
        limits,
        prompts=(prompt,),
        parsing=parsing_of(prompt.tools_json),
        calls=demanded_calls(values, prompt.tools_json),
        logprobs=(top or 0) if values["logprobs"] else -1,
        logprobs_param="top_logprobs",
        max_tokens=values["max_completion_tokens"] or values["max_tokens"],
        default_max_tokens=limits.max_tokens,
        timings=timings,
    )


def job_request(
    values: Mapping[str, Any],
    limits: Limits,
    *,
    prompts: tuple[Prompt, ...],
    logprobs: int,
    logprobs_param: str,
    max_tokens: int | None,
    default_max_tokens: int | None,
    timings: bool,
    echo: bool = False,
    add_special_tokens: bool = True,
    token_ids: bool = False,
    parsing: Parsing | None = None,
    calls: RequiredTools | None = None,
    form: StructuredOutput | None = None,
) -> ParsedRequest:
    """Make a job and the options of its answer from checked `values`, which have all fields of SAMPLING. The keyword
    arguments are for what differs between APIs. `logprobs` -1: none; `logprobs_param` is its field.
    `default_max_tokens` is for a `max_tokens` of None. `calls` and `form` are structures that the answer must match;
    `token_ids`: the answer has token ids. Raises InvalidArgument for values out of range and for fields that contradict
    each other, such as prompt logprobs in a stream. Raises Unsupported for more logprobs than the router returns, and
    for options that a beam search lacks."""
    check_logprobs(logprobs, limits.max_logprobs, logprobs_param)
    prompt_logprobs = -1 if values["prompt_logprobs"] is None else values["prompt_logprobs"]
    check_logprobs(prompt_logprobs, limits.max_logprobs, "prompt_logprobs")
    if values["n"] > limits.max_n:
        raise InvalidArgument(
            "OUT_OF_RANGE", f"n is {values['n']}.", f"Choose a value from 1 to {limits.max_n}.", param="n"
        )
    check_fields_above_low(values)
    stream = values["stream"]
    scored = "prompt_logprobs" if prompt_logprobs >= 0 else "echo" if echo and logprobs >= 0 else ""
    if stream and scored:
        raise InvalidArgument(
            "STREAM_ON",
            f"{scored} asks for logprobs of the prompt, but stream is set.",
            "Set stream to false.",
            param=scored,
        )
    if values["stream_options"] is not None and not stream:
        raise InvalidArgument(
            "STREAM_OFF", "stream_options is set, but stream is not.", "Set stream to true.", param="stream_options"
        )
    options = check_fields(values["stream_options"] or {}, STREAM_OPTIONS)
    seed = values["seed"]
    job = GenerateJob(
        model=values["model"],
        prompts=prompts,
        n=values["n"],
        sampling=Sampling(
            **_NUMBERS.from_fields(values),
            logprobs=logprobs,
            controls=controls_of(values),
            processors=values["logits_processors"],
            prompt_logprobs=max(prompt_logprobs, logprobs) if echo else prompt_logprobs,
        ),
        bad_words=values["bad_words"],
        seed=None if seed in (None, -1) else seed % 2**64,
        max_tokens=max_tokens,
        default_max_tokens=default_max_tokens,
        min_tokens=values["min_tokens"],
        stop_token_ids=values["stop_token_ids"],
        ignore_eos=values["ignore_eos"],
        repetition=repetition_of(values["repetition_detection"]),
        thinking_tokens=None if values["thinking_token_budget"] == -1 else values["thinking_token_budget"],
        structure=structure_of(values, calls, form),
        truncate_to=values["truncate_prompt_tokens"],
        text=TextOptions(
            stop=values["stop"],
            include_stop_str_in_output=values["include_stop_str_in_output"],
            skip_special_tokens=values["skip_special_tokens"],
            spaces_between_special_tokens=values["spaces_between_special_tokens"],
            parsing=parsing,
        ),
        add_special_tokens=add_special_tokens,
        cache_salt=values["cache_salt"],
        session=_session(values),
        beams=values["use_beam_search"],
        length_penalty=values["length_penalty"],
        wants=Wants(
            stream=stream,
            every_token=options["continuous_usage_stats"],
            token_ids=token_ids or values["return_token_ids"],
            tokens_by_id=values["return_tokens_as_token_ids"],
            timings=timings,
            echo=echo,
            prompt_logprobs=prompt_logprobs,
            reasoning=values.get("include_reasoning", True),
            parallel_calls=values.get("parallel_tool_calls", True),
        ),
    )
    if job.beams:
        check_beams(job)
    job = with_kv_transfer(job, values["kv_transfer_params"], stream=stream)
    return ParsedRequest(
        job=job,
        stream=stream,
        include_usage=options["include_usage"],
        continuous_usage=options["continuous_usage_stats"],
        request_id=values["request_id"],
        priority=values["priority"],
        timeout_s=values["timeout_s"] or 0.0,
    )


def chat_prompt(values: Mapping[str, Any], body: Mapping[str, Any]) -> ChatPrompt:
    """Make a conversation from the fields that chat and tokenize share. `documents` and `reasoning_effort` become
    arguments of the template, and take precedence over `chat_template_kwargs`. If the final message is continued, no
    generation prompt is added. Raises InvalidArgument for a body that asks for both, and for malformed messages or
    tools. Raises Unsupported for parts other than text and for allowed_tools."""
    continues = values["continue_final_message"]
    if continues and body.get("add_generation_prompt") is True:
        raise InvalidArgument(
            "CONTRADICTION",
            "continue_final_message and add_generation_prompt exclude each other.",
            "Set add_generation_prompt to false.",
            param="continue_final_message",
        )
    # What else a template may want to know: a field of its own counts more than an argument of that name.
    named = {name: values[name] for name in ("documents", "reasoning_effort") if values.get(name) is not None}
    kwargs = {**(values["chat_template_kwargs"] or {}), **named}
    return ChatPrompt(
        messages_json=json_text("messages", messages_of(values["messages"])),
        tools_json=tools_of(values),
        template_kwargs_json=json_text("chat_template_kwargs", kwargs) if kwargs else "",
        add_generation_prompt=values["add_generation_prompt"] and not continues,
        continue_final_message=continues,
        template=values["chat_template"] or "",
    )


def _session(values: Mapping[str, Any]) -> str:
    """Return a name that requests of one session share: the client's `prompt_cache_key`, else its `user`, cut to 256
    characters. Returns '' if neither is a text."""
    hints = (values.get("prompt_cache_key"), values.get("user"))
    return next((hint[:MAX_ID_CHARS] for hint in hints if isinstance(hint, str) and hint), "")
