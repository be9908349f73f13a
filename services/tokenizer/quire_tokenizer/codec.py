"""Protobuf to the tokenizer's own types and back. Holds no state and makes no decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire.v1 import tokenizer_pb2 as pb
from quire_common.columns import equal_lengths, i32, pack_i32, u8
from quire_common.errors import to_message
from quire_common.telemetry.tracing import extract
from quire_tokenizer.chat.chat_renderer import ChatRequest
from quire_tokenizer.detokenize.detokenizer import OpenRequest, TokenRows
from quire_tokenizer.detokenize.long_answer import in_parts

if TYPE_CHECKING:
    from quire_tokenizer.detokenize.detokenizer import StepText
    from quire_tokenizer.vocabulary import Vocabulary


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
    """Decode a DetokenizeOpen. Raises InvalidArgument with code BAD_COLUMN."""
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
        trace=extract(message.context) if traced else None,
    )


def decode_rows(message: pb.DetokenizeRequest) -> TokenRows:
    """Decode the columns of one step; `finish` may be left out where no row finishes. Raises BAD_COLUMN,
    UNEQUAL_COLUMNS."""
    handle, count = i32(message.handle, "handle"), i32(message.count, "count")
    finish = u8(message.finish, "finish") if message.finish else np.zeros(len(handle), np.uint8)
    equal_lengths("rows", handle=handle, count=count, finish=finish)
    return TokenRows(handle, count, i32(message.token, "token"), finish)


def encode_step(answer: StepText, elapsed_us: int) -> pb.DetokenizeResponse:
    """Encode the answer to one step as one message."""
    response = pb.DetokenizeResponse(
        handle=pack_i32(answer.handle),
        text=answer.text,
        stop_index=pack_i32(answer.stop_index),
        used=pack_i32(answer.used),
        text_offset=pack_i32(answer.offsets),
        elapsed_us=elapsed_us,
    )
    for handle, error in answer.errors:
        response.errors.add(handle=handle, error=to_message(error))
    return response


def encode_long_step(answer: StepText, elapsed_us: int) -> list[pb.DetokenizeResponse]:
    """Encode the answer to one step as several messages, as many as its texts need; all but the last say that more
    follow."""
    responses: list[pb.DetokenizeResponse] = []
    for part, cut in in_parts(answer):
        responses.append(encode_step(part, 0))
        responses[-1].more, responses[-1].cut = True, cut
    responses[-1].more, responses[-1].elapsed_us = False, elapsed_us
    return responses


def encode_info(vocabulary: Vocabulary) -> pb.GetTokenizerInfoResponse:
    """Encode what clients of the service want to know of the model."""
    return pb.GetTokenizerInfoResponse(
        model=vocabulary.model,
        vocab_size=vocabulary.size,
        eos_token_ids=pack_i32(sorted(vocabulary.eos_ids)),
        bos_token_id=vocabulary.bos_id,
        has_chat_template=bool(vocabulary.templates),
        digest=vocabulary.digest,
        thinking_start_ids=pack_i32(vocabulary.thinking.start),
        thinking_end_ids=pack_i32(vocabulary.thinking.end),
    )
