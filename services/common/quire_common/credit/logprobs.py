"""Logprobs of tokens, as columns, and their way onto the wire."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from quire.v1 import common_pb2
from quire_common.columns import NO_F32, NO_I32, equal_lengths, f32, i32, pack_f32, pack_i32
from quire_common.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray


def _empty() -> NDArray[np.int32]:
    return NO_I32


def _empty_f32() -> NDArray[np.float32]:
    return NO_F32


@dataclass(slots=True)
class LogprobColumns:
    """Logprobs of the tokens for which they were requested: L entries. They are natural logarithms, computed from the
    raw logits before temperature."""

    token_index: NDArray[np.int32] = field(default_factory=_empty)
    """[L] index into the message's, or the step's, column of tokens; ascending."""
    logprob: NDArray[np.float32] = field(default_factory=_empty_f32)
    """[L] of the chosen token."""
    rank: NDArray[np.int32] = field(default_factory=_empty)
    """[L] of the chosen token, from 1: 1 + the number of tokens with a larger logit."""
    top_count: NDArray[np.int32] = field(default_factory=_empty)
    """[L] number of alternatives of each entry."""
    top_id: NDArray[np.int32] = field(default_factory=_empty)
    """[sum of top_count] most likely first; among equals the lower id first."""
    top_logprob: NDArray[np.float32] = field(default_factory=_empty_f32)
    """[sum of top_count]."""

    def __len__(self) -> int:
        return len(self.logprob)

    def slice(self, begin: int, end: int, first_token: int) -> LogprobColumns:
        """Return the entries `begin` to `end` (exclusive) with their alternatives. `first_token` is subtracted from
        their token indices."""
        tops = np.concatenate([[0], np.cumsum(self.top_count, dtype=np.int64)])[[begin, end]]
        return LogprobColumns(
            self.token_index[begin:end] - np.int32(first_token),
            self.logprob[begin:end],
            self.rank[begin:end],
            self.top_count[begin:end],
            self.top_id[tops[0] : tops[1]],
            self.top_logprob[tops[0] : tops[1]],
        )

    def select(self, tokens: NDArray[np.bool_]) -> LogprobColumns:
        """Return the entries of the tokens where the mask `tokens` (one per token) holds; their token indices count
        these tokens alone."""
        kept = tokens[self.token_index]
        tops = np.repeat(kept, self.top_count)
        position = np.cumsum(tokens, dtype=np.int32) - 1
        return LogprobColumns(
            position[self.token_index[kept]].astype(np.int32),
            self.logprob[kept],
            self.rank[kept],
            self.top_count[kept],
            self.top_id[tops],
            self.top_logprob[tops],
        )

    def numbered(self) -> LogprobColumns:
        """Return these columns with token indices 0, 1 and so on: for a column of tokens in which every token has an
        entry."""
        return replace(self, token_index=np.arange(len(self), dtype=np.int32))


def join_logprobs(parts: Iterable[tuple[int, LogprobColumns | None]]) -> LogprobColumns | None:
    """Join columns in order, each given with the index at which its tokens begin in the joined column of tokens. Parts
    that are None are left out. If only one part is left and it begins at 0, it is returned itself. Returns None if
    every part is None."""
    found = [(first, part) for first, part in parts if part is not None]
    if len(found) == 1 and found[0][0] == 0:
        return found[0][1]
    if not found:
        return None
    return LogprobColumns(
        np.concatenate([part.token_index + np.int32(first) for first, part in found]),
        np.concatenate([part.logprob for _, part in found]),
        np.concatenate([part.rank for _, part in found]),
        np.concatenate([part.top_count for _, part in found]),
        np.concatenate([part.top_id for _, part in found]),
        np.concatenate([part.top_logprob for _, part in found]),
    )


def check_sum(name: str, counts: NDArray[np.int32], total: int) -> None:
    """Raise InvalidArgument unless the counts are not negative and add up to `total`; `name` is their column."""
    # A negative count, taken as unsigned, is more than can follow.
    if int(counts.view(np.uint32).sum()) != total:
        raise InvalidArgument(
            "BAD_COUNTS", f"Column {name} adds up to {int(counts.sum())}, {total} follow.", "Send counts that add up."
        )


def logprobs_to_pb(logprobs: LogprobColumns) -> common_pb2.LogprobColumns:
    """Encode the columns."""
    return common_pb2.LogprobColumns(
        token_index=pack_i32(logprobs.token_index),
        logprob=pack_f32(logprobs.logprob),
        rank=pack_i32(logprobs.rank),
        top_count=pack_i32(logprobs.top_count),
        top_id=pack_i32(logprobs.top_id),
        top_logprob=pack_f32(logprobs.top_logprob),
    )


def logprobs_from_pb(message: common_pb2.LogprobColumns) -> LogprobColumns:
    """Decode the columns. Raises InvalidArgument if a column's bytes are no multiple of its element's size, the lengths
    disagree, or `top_count` does not add up to the number of alternatives. Token indices, ids and ranks are not
    checked. The columns are read-only."""
    result = LogprobColumns(
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
