"""Logprobs of tokens, as columns, and their way onto the wire."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from quire.v1 import common_pb2
from quire_common.columns import NO_F32, NO_I32, equal_lengths, f32, i32, pack_f32, pack_i32
from quire_common.errors import InvalidArgument

if TYPE_CHECKING:
    from numpy.typing import NDArray


def _empty() -> NDArray[np.int32]:
    return NO_I32


def _empty_f32() -> NDArray[np.float32]:
    return NO_F32


@dataclass(slots=True)
class Logprobs:
    """Logprobs of the tokens that asked. token_index points into the message's token column; tops are concatenated."""

    token_index: NDArray[np.int32] = field(default_factory=_empty)
    logprob: NDArray[np.float32] = field(default_factory=_empty_f32)
    rank: NDArray[np.int32] = field(default_factory=_empty)
    top_count: NDArray[np.int32] = field(default_factory=_empty)
    top_id: NDArray[np.int32] = field(default_factory=_empty)
    top_logprob: NDArray[np.float32] = field(default_factory=_empty_f32)


def slice_logprobs(logprobs: Logprobs, begin: int, end: int) -> Logprobs:
    """Entries begin to end; `token_index` counts from 0."""
    tops = np.concatenate([[0], np.cumsum(logprobs.top_count, dtype=np.int64)])[[begin, end]]
    return Logprobs(
        logprobs.token_index[begin:end] - np.int32(begin),
        logprobs.logprob[begin:end],
        logprobs.rank[begin:end],
        logprobs.top_count[begin:end],
        logprobs.top_id[tops[0] : tops[1]],
        logprobs.top_logprob[tops[0] : tops[1]],
    )


def check_sum(name: str, counts: NDArray[np.int32], total: int) -> None:
    """Raise InvalidArgument unless the counts are non-negative and add up to the rows that follow."""
    # A negative count, taken as unsigned, is more than can follow.
    if int(counts.view(np.uint32).sum()) != total:
        raise InvalidArgument(
            "BAD_COUNTS", f"Column {name} adds up to {int(counts.sum())}, {total} follow.", "Send counts that add up."
        )


def logprobs_to_pb(logprobs: Logprobs) -> common_pb2.LogprobColumns:
    """Domain to wire."""
    return common_pb2.LogprobColumns(
        token_index=pack_i32(logprobs.token_index),
        logprob=pack_f32(logprobs.logprob),
        rank=pack_i32(logprobs.rank),
        top_count=pack_i32(logprobs.top_count),
        top_id=pack_i32(logprobs.top_id),
        top_logprob=pack_f32(logprobs.top_logprob),
    )


def logprobs_from_pb(message: common_pb2.LogprobColumns) -> Logprobs:
    """Wire to domain; raises InvalidArgument for columns whose lengths do not fit."""
    result = Logprobs(
        token_index=i32(message.token_index, "token_index"),
        logprob=f32(message.logprob, "logprob"),
        rank=i32(message.rank, "rank"),
        top_count=i32(message.top_count, "top_count"),
        top_id=i32(message.top_id, "top_id"),
        top_logprob=f32(message.top_logprob, "top_logprob"),
    )
    equal_lengths(
        "logprobs",
        token_index=result.token_index,
        logprob=result.logprob,
        rank=result.rank,
        top_count=result.top_count,
    )
    equal_lengths("tops", id=result.top_id, logprob=result.top_logprob)
    check_sum("top_count", result.top_count, len(result.top_id))
    return result
