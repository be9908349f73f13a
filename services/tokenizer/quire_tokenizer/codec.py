"""Converts protobuf messages to the tokenizer's own types and back. Holds no state and makes no decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire.v1 import tokenizer_pb2 as pb
from quire_common.columns import equal_lengths, i32, pack_i32, u8
from quire_common.errors import InvalidArgument, to_message
from quire_common.structured.constraint import constraint_to_pb
from quire_common.telemetry.tracing import extract
from quire_tokenizer.chat.chat_renderer import ChatRequest
from quire_tokenizer.chat.conversation import load_json
from quire_tokenizer.detokenize.detokenizer import OpenRequest, TokenRows
from quire_tokenizer.detokenize.long_answer import in_parts
from quire_tokenizer.grammar.grammar_source import TOOLS, GrammarSource
from quire_tokenizer.output_parsing.answer_parsers import ParseOptions, PromptEnd

if TYPE_CHECKING:
    from quire_tokenizer.detokenize.detokenizer import StepText
    from quire_tokenizer.grammar.grammar_compiler import CompiledGrammar
    from quire_tokenizer.vocabulary import Vocabulary

_PROMPT_ENDS: dict[pb.PromptEnd, PromptEnd] = {
    pb.PROMPT_END_THINKING: "thinking",
    pb.PROMPT_END_ANSWERING: "answering",
}
_PROMPT_END_NUMBERS = {name: number for number, name in _PROMPT_ENDS.items()}


def encode_prompt_end(prompt_end: PromptEnd) -> pb.PromptEnd:
    """Encode a PromptEnd, which says whether a prompt ends within reasoning or after it."""
    return _PROMPT_END_NUMBERS.get(prompt_end, pb.PROMPT_END_UNSPECIFIED)


def decode_chat(message: pb.RenderChatRequest) -> ChatRequest:
    """Decode a RenderChatRequest, without the fields that concern encoding."""
    return ChatRequest(
        messages_json=message.messages_json,
        tools_json=message.tools_json,
        kwargs_json=message.template_kwargs_json,
        add_generation_prompt=message.add_generation_prompt,
        continue_final_message=message.continue_final_message,
        template=message.chat_template,
    )


def decode_open(message: pb.DetokenizeOpen) -> OpenRequest:
    """Decode the options of a request that is to be opened; `parsing` and `trace` are None if the message has none.
    Raises InvalidArgument for a column of ids with a wrong length (BAD_COLUMN), or tools that are not a JSON list."""
    traced = message.HasField("context") and message.context.traceparent
    return OpenRequest(
        handle=message.handle,
        stop=tuple(message.stop),
        include_stop=message.include_stop_str_in_output,
        skip_special_tokens=message.skip_special_tokens,
        spaces_between_special_tokens=message.spaces_between_special_tokens,
        prior_ids=i32(message.prior_ids, "prior_ids"),
        more_prior=message.more_prior,
        further=message.further,
        chars_sent=message.chars_sent,
        min_tokens=message.min_tokens,
        want_offsets=message.want_offsets,
        stop_token_ids=frozenset(i32(message.stop_token_ids, "stop_token_ids").tolist()),
        parsing=_decode_parsing(message.parsing) if message.HasField("parsing") else None,
        trace=extract(message.context) if traced else None,
    )


def _decode_parsing(message: pb.OutputParsing) -> ParseOptions:
    """Decode the options for parsing an answer; without tools in the message, they are None. Raises InvalidArgument if
    the tools are not a JSON list."""
    return ParseOptions(
        tools=load_json(message.tools_json, "tools", list) if message.tools_json else None,
        calls=message.tool_calls,
        reasoning=message.reasoning,
        prompt_end=_PROMPT_ENDS.get(message.prompt_end, "unknown"),
    )


def decode_grammar_source(message: pb.CompileGrammarRequest) -> GrammarSource:
    """Decode the source of the grammar that an answer must match: the request's tools, or else its constraint. Raises
    InvalidArgument if the request has neither."""
    prompt_end = _PROMPT_ENDS.get(message.prompt_end, "unknown")
    if message.HasField("tools"):
        return GrammarSource(
            TOOLS,
            message.tools.tools_json,
            reasoning=message.reasoning,
            prompt_end=prompt_end,
            required=message.tools.required,
            tool=message.tools.name,
            parallel=message.tools.parallel,
        )
    if not message.HasField("constraint"):
        raise InvalidArgument(
            "NOTHING_TO_COMPILE", "The request has neither a constraint nor tools.", "Send one.", param="constraint"
        )
    constraint = message.constraint
    return GrammarSource(
        constraint.kind,
        constraint.text,
        strict=constraint.strict,
        disable_any_whitespace=constraint.disable_any_whitespace,
        disable_additional_properties=constraint.disable_additional_properties,
        whitespace_pattern=constraint.whitespace_pattern,
        reasoning=message.reasoning,
        prompt_end=prompt_end,
    )


def encode_grammar(compiled: CompiledGrammar, elapsed_us: int) -> pb.CompileGrammarResponse:
    """Encode a grammar, with warnings about the parts of the constraint that it does not enforce."""
    return pb.CompileGrammarResponse(
        constraint=constraint_to_pb(compiled.constraint), warnings=compiled.warnings, elapsed_us=elapsed_us
    )


def decode_rows(message: pb.DetokenizeRequest) -> TokenRows:
    """Decode the columns of one step; `finish` may be left out if no row finishes. Raises InvalidArgument with code
    BAD_COLUMN for a column whose length does not fit its type, and UNEQUAL_COLUMNS if handle, count and finish differ
    in length. Whether the counts add up to the tokens is checked by `Detokenizer.step`."""
    handle, count = i32(message.handle, "handle"), i32(message.count, "count")
    finish = u8(message.finish, "finish") if message.finish else np.zeros(len(handle), np.uint8)
    equal_lengths("rows", handle=handle, count=count, finish=finish)
    return TokenRows(handle, count, i32(message.token, "token"), finish)


def encode_step(answer: StepText, elapsed_us: int) -> pb.DetokenizeResponse:
    """Encode the answer to one step as one message: rows, offsets, parsed parts, reasoning tokens, and errors by
    handle. Columns of parts and of reasoning tokens are left out if there are none."""
    response = pb.DetokenizeResponse(
        handle=pack_i32(answer.handle),
        text=answer.text,
        stop_index=pack_i32(answer.stop_index),
        used=pack_i32(answer.used),
        text_offset=pack_i32(answer.offsets),
        elapsed_us=elapsed_us,
    )
    if answer.parts:
        response.part_handle = pack_i32([handle for handle, _ in answer.parts])
        response.part_kind = bytes(part.kind for _, part in answer.parts)
        response.part_call = pack_i32([part.call for _, part in answer.parts])
        response.part_chars = pack_i32([part.chars for _, part in answer.parts])
    if answer.reasoning_tokens:
        response.reasoning_handle = pack_i32([handle for handle, _ in answer.reasoning_tokens])
        response.reasoning_tokens = pack_i32([tokens for _, tokens in answer.reasoning_tokens])
    for handle, error in answer.errors:
        response.errors.add(handle=handle, error=to_message(error))
    return response


def encode_long_step(answer: StepText, elapsed_us: int) -> list[pb.DetokenizeResponse]:
    """Encode the answer to one step as several messages, as many as its texts need. All messages but the last have
    `more` set; `cut` says that the text of the last row goes on in the next message. The last message has the time."""
    responses: list[pb.DetokenizeResponse] = []
    for part, cut in in_parts(answer):
        responses.append(encode_step(part, 0))
        responses[-1].more, responses[-1].cut = True, cut
    responses[-1].more, responses[-1].elapsed_us = False, elapsed_us
    return responses


def encode_info(vocabulary: Vocabulary) -> pb.GetTokenizerInfoResponse:
    """Encode the facts about the model that clients need: name, vocabulary size, EOS and BOS ids, digest, thinking
    marks, parsers, and whether there is a chat template."""
    return pb.GetTokenizerInfoResponse(
        model=vocabulary.model,
        vocab_size=vocabulary.size,
        eos_token_ids=pack_i32(sorted(vocabulary.eos_ids)),
        bos_token_id=vocabulary.bos_id,
        has_chat_template=bool(vocabulary.templates),
        digest=vocabulary.digest,
        thinking_start_ids=pack_i32(vocabulary.thinking.start),
        thinking_end_ids=pack_i32(vocabulary.thinking.end),
        tool_parser=vocabulary.parsers.tool_parser,
        reasoning_parser=vocabulary.parsers.reasoning_parser,
    )
