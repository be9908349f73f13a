"""What the fake worker answers: a function of the whole prefix, so that a wrong page or token changes it."""

from __future__ import annotations

import zlib

from quire_common.credit import Finish
from quire_common.sequence import Sequence

EOS = 1


def fold(prefix: int, token: int) -> int:
    """The "KV" of a position: a hash of the one before and its token."""
    return zlib.crc32(token.to_bytes(4, "little"), prefix)


def next_token(prefix: int, vocab_size: int, blocked: set[int]) -> int:
    token = prefix % vocab_size
    while token in blocked:
        token = (token + 1) % vocab_size
    return token


def stop_ids(sequence: Sequence) -> set[int]:
    return set(sequence.stop.stop_token_ids) | (set() if sequence.stop.ignore_eos else {EOS})


def undisturbed(sequence: Sequence, vocab_size: int = 97, max_len: int = 256) -> tuple[list[int], Finish]:
    """All output tokens of the request when nothing disturbs it, and how it ends."""
    tokens, prefix = [*sequence.prompt_ids.tolist(), *sequence.output_ids.tolist()], 0
    for token in tokens:
        prefix = fold(prefix, token)
    while True:
        token, finish = sample(sequence, tokens, prefix, vocab_size, max_len)
        tokens.append(token)
        prefix = fold(prefix, token)
        if finish:
            return tokens[len(sequence.prompt_ids) :], finish


def sample(sequence: Sequence, tokens: list[int], prefix: int, vocab_size: int, max_len: int) -> tuple[int, Finish]:
    emitted = len(tokens) - len(sequence.prompt_ids)
    ends = stop_ids(sequence)
    token = next_token(prefix, vocab_size, ends if emitted < sequence.stop.min_tokens else set())
    if token in ends:
        return token, Finish.STOP
    if emitted + 1 >= sequence.stop.max_tokens or len(tokens) + 1 >= max_len:
        return token, Finish.LENGTH
    return token, Finish.NONE
