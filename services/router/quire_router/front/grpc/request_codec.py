"""Converts a quire.v1.GenerateRequest to a job. No code behind this module sees protobuf."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from quire.v1 import common_pb2 as pb
from quire_common.columns import i32
from quire_common.errors import InvalidArgument
from quire_common.repetition import repetition_from_pb
from quire_common.sequence import sampling_from_pb, unsupported
from quire_common.structured.constraint import COMPILED
from quire_router.front.grpc.tool_codec import tool_values
from quire_router.front.parameters.request_limits import DEFAULT_COMPLETION_TOKENS, with_best_of
from quire_router.front.parameters.tables import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_ID_CHARS,
    MAX_LENGTH_PENALTY,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOP_STRINGS,
)
from quire_router.front.parameters.tool_fields import demanded_calls, tools_of
from quire_router.requests.beam_search import check_beams
from quire_router.requests.pipeline import check_logprobs
from quire_router.sequences.job import (
    ChatPrompt,
    GenerateJob,
    Parsing,
    Prompt,
    Resume,
    TextOptions,
    TextPrompt,
    TokenPrompt,
    Wants,
)
from quire_router.sequences.structured import StructuredOutput

if TYPE_CHECKING:
    from quire.v1 import inference_pb2 as ib
    from quire_router.front.parameters.request_limits import Limits
    from quire_router.sequences.structured import AnswerStructure, RequiredTools


def parse_generate(request: ib.GenerateRequest, limits: Limits) -> GenerateJob:
    """Check a GenerateRequest and convert it to a streamed job of one prompt. With beam search, or with a `best_of`
    that is neither 0 (which means unset) nor n, the job is not streamed. Unset fields get the contract's defaults.
    Without `max_tokens`, a text or token prompt gets 16 tokens; for a chat, and with `fill_context`, the answer may
    fill the context. Raises InvalidArgument for a missing prompt, and for values out of bounds or in contradiction.
    Raises Unsupported for another kind, an adapter, media, more logprobs than the router returns, and options that beam
    search lacks."""
    _refuse_unsupported(request)
    sampling = sampling_from_pb(request.sampling)
    check_logprobs(sampling.logprobs, limits.max_logprobs, "sampling.logprobs")
    check_logprobs(sampling.prompt_logprobs, limits.max_logprobs, "sampling.prompt_logprobs")
    n = request.n if request.HasField("n") else 1
    _check_range("n", n, 1, limits.max_n)
    best_of = request.best_of if request.HasField("best_of") else 0
    max_tokens = request.max_tokens if request.HasField("max_tokens") else None
    if max_tokens is not None:
        _check_range("max_tokens", max_tokens, 1, 2**31 - 1)
    _check_count("stop", len(request.stop), MAX_STOP_STRINGS, "items")
    for stop in request.stop:
        if not stop:
            raise InvalidArgument("BAD_STRING", "stop has an empty string.", "Leave it out.", param="stop")
        _check_count("stop", len(stop), MAX_STOP_CHARS, "characters")
    stop_token_ids = i32(request.stop_token_ids, "stop_token_ids")
    _check_count("stop_token_ids", len(stop_token_ids), MAX_STOP_IDS, "items")
    _check_count("cache_salt", len(request.cache_salt), MAX_ID_CHARS, "characters")
    _check_count("bad_words", len(request.bad_words), MAX_BAD_WORDS, "items")
    for word in request.bad_words:
        if not word:
            raise InvalidArgument("BAD_STRING", "bad_words has an empty string.", "Leave it out.", param="bad_words")
        _check_count("bad_words", len(word), MAX_BAD_WORD_CHARS, "characters")
    tools = tool_values(request)
    tools_json = tools_of(tools)
    prompt = _prompt(request, tools_json)
    job = GenerateJob(
        model=request.model,
        prompts=(prompt,),
        n=n,
        sampling=replace(sampling, seed=0, sample=0),
        bad_words=tuple(request.bad_words),
        seed=request.sampling.seed if request.sampling.HasField("seed") else None,
        max_tokens=max_tokens,
        default_max_tokens=(
            None if isinstance(prompt, ChatPrompt) or request.fill_context else DEFAULT_COMPLETION_TOKENS
        ),
        min_tokens=request.min_tokens,
        stop_token_ids=tuple(stop_token_ids.tolist()),
        ignore_eos=request.ignore_eos,
        repetition=repetition_from_pb(request.repetition_detection),
        thinking_tokens=_at_least_minus_one(request, "thinking_token_budget", none=-1),
        structure=_structure(request, demanded_calls(tools, tools_json)),
        truncate_to=_at_least_minus_one(request, "truncate_prompt_tokens"),
        text=TextOptions(
            stop=tuple(request.stop),
            include_stop_str_in_output=request.include_stop_str_in_output,
            skip_special_tokens=not request.HasField("skip_special_tokens") or request.skip_special_tokens,
            spaces_between_special_tokens=(
                not request.HasField("spaces_between_special_tokens") or request.spaces_between_special_tokens
            ),
            parsing=_parsing(request, tools_json),
        ),
        add_special_tokens=not request.HasField("add_special_tokens") or request.add_special_tokens,
        cache_salt=request.cache_salt,
        first_sample=request.sampling.sample,
        resume=_resume(request, min(best_of, limits.max_n) or n),  # a larger best_of is refused below
        wants=Wants(
            stream=True,
            token_ids=request.return_token_ids,
            timings=request.return_timings,
            prompt_logprobs=sampling.prompt_logprobs,
            parallel_calls=tools["parallel_tool_calls"],
        ),
    )
    return _with_beams_or_best_of(job, request, best_of, limits)


def _with_beams_or_best_of(job: GenerateJob, request: ib.GenerateRequest, best_of: int, limits: Limits) -> GenerateJob:
    """Return the job changed for beam search, or for a best_of that is neither 0 (unset) nor n, and then not streamed;
    otherwise return `job` unchanged. A beam search has a length penalty, by default 1.0. Raises InvalidArgument for
    values out of range, and Unsupported for options that beam search lacks, `resume` included."""
    whole = replace(job, wants=replace(job.wants, stream=False))
    if request.HasField("beam_search"):
        asked = request.beam_search
        length_penalty = asked.length_penalty if asked.HasField("length_penalty") else 1.0
        if not abs(length_penalty) <= MAX_LENGTH_PENALTY:
            raise InvalidArgument(
                "OUT_OF_RANGE",
                f"beam_search.length_penalty is {length_penalty}.",
                f"Choose from -{MAX_LENGTH_PENALTY} to {MAX_LENGTH_PENALTY}.",
                param="beam_search.length_penalty",
            )
        whole = replace(whole, beams=True, length_penalty=length_penalty, best_of=max(best_of, 1))
        check_beams(whole)
        if job.resume is not None:
            raise unsupported("resume", " with beam_search")
        return whole
    return with_best_of(whole, best_of, limits, stream=False) if best_of and best_of != job.n else job


def _resume(request: ib.GenerateRequest, n: int) -> Resume | None:
    """Convert the request's `resume` (output ids, and the number of characters already sent); None if it has none. `n`
    is the number of sequences. Raises InvalidArgument for a sample index out of range (also without `resume`), for
    output ids that are not whole int32 numbers, and for a `resume` with `n` above 1."""
    _check_range("sampling.sample", request.sampling.sample, 0, 2**31 - 1 - n)
    if not request.HasField("resume"):
        return None
    if n != 1:
        raise InvalidArgument(
            "BAD_RESUME",
            f"resume continues one choice, but n is {n}.",
            "Resume each choice by its sample.",
            param="resume",
        )
    i32(request.resume.output_ids, "resume.output_ids")
    return Resume(request.resume.output_ids, request.resume.characters)


def _at_least_minus_one(
    request: ib.GenerateRequest,
    name: Literal["thinking_token_budget", "truncate_prompt_tokens"],
    none: int | None = None,
) -> int | None:
    """Return the value of an integer field; None if the field is not set or equals `none`. Raises InvalidArgument for a
    value below -1."""
    value = getattr(request, name)
    if not request.HasField(name) or value == none:
        return None
    _check_range(name, value, -1, 2**31 - 1)
    return int(value)


def _parsing(request: ib.GenerateRequest, tools_json: str) -> Parsing | None:
    """Return the parts that the tokenizer separates from the answer's text: reasoning, and calls if there are tools.
    Each must be asked for. None: all of the answer is text."""
    calls, reasoning = request.parts.tool_calls and bool(tools_json), request.parts.reasoning
    return Parsing(calls, reasoning, tools_json if calls else "") if calls or reasoning else None


def _structure(request: ib.GenerateRequest, calls: RequiredTools | None) -> AnswerStructure | None:
    """Return the structure that the answer must match: the request's constraint, else `calls`, which the tools demand;
    None if there is neither. Raises InvalidArgument for both together, for either of them with `ignore_eos`, and for a
    constraint that is already compiled, since clients must send its source."""
    if calls is not None and request.HasField("constraint"):
        raise InvalidArgument(
            "CONTRADICTION",
            f"constraint and {calls.param} say what the answer must match.",
            "Send one of them.",
            param="constraint",
        )
    if request.ignore_eos and (calls is not None or request.HasField("constraint")):
        param = "constraint" if calls is None else calls.param
        raise InvalidArgument(
            "CONTRADICTION",
            f"{param} says where the answer ends, and ignore_eos that it does not end there.",
            "Leave ignore_eos out.",
            param="ignore_eos",
        )
    if not request.HasField("constraint"):
        return calls
    asked = request.constraint
    if asked.kind == COMPILED or asked.digest:
        raise InvalidArgument(
            "CONSTRAINT_COMPILED",
            "The constraint is a compiled one.",
            "Send its source: a schema, a regular expression or another kind of the contract.",
            param="constraint.kind",
        )
    return StructuredOutput(
        asked.kind,
        asked.text,
        strict=asked.strict,
        disable_any_whitespace=asked.disable_any_whitespace,
        disable_additional_properties=asked.disable_additional_properties,
        whitespace_pattern=asked.whitespace_pattern,
    )


def _prompt(request: ib.GenerateRequest, tools_json: str) -> Prompt:
    """Convert the request's text, token ids or chat to a prompt; `tools_json` is for the chat's template. By default, a
    chat gets a generation prompt unless the final message is continued. Raises InvalidArgument if no prompt is set, or
    if the token ids are not whole int32 numbers."""
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return TextPrompt(request.text)
    if kind == "token_ids":
        return TokenPrompt(i32(request.token_ids.ids, "token_ids"))
    if kind == "chat":
        chat = request.chat
        opens = chat.HasField("add_generation_prompt")
        return ChatPrompt(
            messages_json=chat.messages_json,
            tools_json=tools_json,
            template_kwargs_json=chat.template_kwargs_json,
            add_generation_prompt=chat.add_generation_prompt if opens else not chat.continue_final_message,
            continue_final_message=chat.continue_final_message,
            template=chat.chat_template,
        )
    raise InvalidArgument("MISSING_FIELD", "The prompt is missing.", "Set text, token_ids or chat.", param="prompt")


def _refuse_unsupported(request: ib.GenerateRequest) -> None:
    """Raise Unsupported, naming the field, if the request has another kind than GENERATE, an adapter or media. An
    unspecified kind is accepted."""
    if request.kind not in (pb.REQUEST_KIND_UNSPECIFIED, pb.REQUEST_KIND_GENERATE):
        raise unsupported("kind")
    for name in ("adapter", "media"):
        if getattr(request, name):
            raise unsupported(name)


def _check_range(name: str, value: int, low: int, high: int) -> None:
    """Raise InvalidArgument unless `low` <= `value` <= `high`."""
    if not low <= value <= high:
        raise InvalidArgument("OUT_OF_RANGE", f"{name} is {value}.", f"Choose from {low} to {high}.", param=name)


def _check_count(name: str, count: int, most: int, of_what: str) -> None:
    """Raise InvalidArgument if `count`, the number of items or characters of field `name`, is above `most`. `of_what`
    is their noun in the message."""
    if count > most:
        raise InvalidArgument(
            "TOO_MANY_ITEMS",
            f"{name} has {count} {of_what}; the limit is {most}.",
            f"Send at most {most} {of_what}.",
            param=name,
        )
