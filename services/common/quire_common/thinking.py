"""ThinkingBudget: how many tokens a model may think before its answer must begin. vLLM's `thinking_token_budget`.

The model decides which tokens begin and end thinking, and tokenizers know them. The worker, which samples, counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.v1 import common_pb2 as pb
from quire_common.columns import i32, pack_i32
from quire_common.errors import InvalidArgument

# A mark is compared with the end of the output at every token.
MAX_MARK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """At most `max_tokens` between the tokens of a start mark and those of an end mark."""

    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    max_tokens: int


def check_thinking(thinking: ThinkingBudget, vocab_size: int) -> None:
    """Raise InvalidArgument unless the start mark and the end mark have 1 to MAX_MARK_TOKENS tokens each, all in the
    vocabulary."""
    for name, ids in (("start", thinking.start_ids), ("end", thinking.end_ids)):
        if not 1 <= len(ids) <= MAX_MARK_TOKENS or not all(0 <= token < vocab_size for token in ids):
            raise InvalidArgument(
                "BAD_THINKING_MARK",
                f"The {name} of thinking is marked by {len(ids)} tokens, or by one that the model does not have.",
                f"Name marks of 1 to {MAX_MARK_TOKENS} tokens below {vocab_size}.",
                param="thinking_token_budget",
            )


def thinking_to_pb(thinking: ThinkingBudget) -> pb.ThinkingBudget:
    """Domain to wire."""
    return pb.ThinkingBudget(
        start_ids=pack_i32(thinking.start_ids), end_ids=pack_i32(thinking.end_ids), max_tokens=thinking.max_tokens
    )


def thinking_from_pb(message: pb.ThinkingBudget) -> ThinkingBudget:
    """Decode the budget, unchecked but for the columns of ids (InvalidArgument); `max_tokens` is capped at the greatest
    int32."""
    return ThinkingBudget(
        start_ids=tuple(i32(message.start_ids, "thinking.start_ids").tolist()),
        end_ids=tuple(i32(message.end_ids, "thinking.end_ids").tolist()),
        max_tokens=min(message.max_tokens, 2**31 - 1),
    )
