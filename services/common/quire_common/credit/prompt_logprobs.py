"""Logprobs of prompt tokens, a chunk of a sequence at a time, and their way onto the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.v1 import common_pb2
from quire_common.columns import equal_lengths, i32, pack_i32
from quire_common.credit.logprobs import LogprobColumns, check_sum, join_logprobs, logprobs_from_pb, logprobs_to_pb

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of the prompt tokens at positions `first`, `first + 1` and so on, with one entry each. `owner` is a slot
    in a Report, or a handle in a session."""

    owner: int
    first: int
    logprobs: LogprobColumns


def prompt_logprobs_to_pb(chunks: Sequence[PromptLogprobs]) -> common_pb2.PromptLogprobColumns:
    """Encode the chunks as columns. Each chunk must have an entry for each of its tokens; the token indices on the wire
    count the tokens of all chunks in a row."""
    joined = join_logprobs((0, chunk.logprobs) for chunk in chunks) or LogprobColumns()
    return common_pb2.PromptLogprobColumns(
        owner=pack_i32([chunk.owner for chunk in chunks]),
        first=pack_i32([chunk.first for chunk in chunks]),
        count=pack_i32([len(chunk.logprobs) for chunk in chunks]),
        logprobs=logprobs_to_pb(joined.numbered()),
    )


def prompt_logprobs_from_pb(message: common_pb2.PromptLogprobColumns) -> list[PromptLogprobs]:
    """Decode a message into its chunks. Token indices are made relative to each chunk's first token. Raises
    InvalidArgument if columns differ in length, the chunks' counts do not add up to the entries, or a column is
    malformed."""
    owner, first, count = (i32(getattr(message, name), name) for name in ("owner", "first", "count"))
    equal_lengths("prompt_logprobs", owner=owner, first=first, count=count)
    logprobs = logprobs_from_pb(message.logprobs)
    check_sum("count", count, len(logprobs))
    ends = np.cumsum(count).tolist()
    return [
        PromptLogprobs(of, at, logprobs.slice(end - entries, end, end - entries))
        for of, at, entries, end in zip(owner.tolist(), first.tolist(), count.tolist(), ends, strict=True)
    ]
