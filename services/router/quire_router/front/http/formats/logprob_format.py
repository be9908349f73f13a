"""Writes logprobs in OpenAI's two forms: parallel lists for completions, a list of objects for chat. A logprob below
-9999 is written as -9999."""

from __future__ import annotations

from codecs import getincrementaldecoder
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire_router.front.http.formats.large_json import written

if TYPE_CHECKING:
    from collections.abc import Sequence

    import orjson

    from quire_router.sequences.delta import Delta, LogprobEntry
    from quire_router.text.token_bytes import TokenBytes

# JSON has no -Infinity; OpenAI and vLLM both write this instead.
_FLOOR = -9999.0
_MOST_SHIFT = 8


def token_text(token: bytes) -> str:
    """Return a token's bytes as a string. For a token that is only a part of a character, the string is `bytes:` and
    the bytes in hexadecimal, as in OpenAI's API."""
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


class TokenNames:
    """How logprobs name their tokens: by text or, with `by_id`, by id, since two tokens may have the same text."""

    def __init__(self, token_bytes: TokenBytes, *, by_id: bool) -> None:
        self.token_bytes = token_bytes
        self._by_id = by_id

    def of(self, token_id: int) -> str:
        """Return the name of a token."""
        return f"token_id:{token_id}" if self._by_id else token_text(self.token_bytes.get(token_id))


def completion_logprobs(delta: Delta, names: TokenNames, start: int) -> dict[str, Any]:
    """Return a delta's logprobs as the parallel lists of completions: tokens, their logprobs, their offsets in the
    text, and for each, the alternatives and the token itself. `start`: characters of the choice before this delta's
    first token."""
    tokens = [names.of(entry.token_id) for entry in delta.entries]
    return {
        "text_offset": [start, *delta.offsets[:-1]][: len(tokens)],
        "token_logprobs": [_finite(entry.logprob) for entry in delta.entries],
        "tokens": tokens,
        "top_logprobs": [_top_of(entry, token, names) for entry, token in zip(delta.entries, tokens, strict=True)],
    }


def echoed_logprobs(
    prompt: str, ids: Sequence[int], entries: Sequence[LogprobEntry | None], most: int, names: TokenNames
) -> dict[str, list[Any]]:
    """Return the logprobs of an echoed prompt as the parallel lists of completions, with at most `most` alternatives
    per token and the token itself. `ids` and `entries` have one item per token; an entry of None, as the first token's,
    gives null."""
    texts = [names.of(token_id) for token_id in ids]
    return {
        "text_offset": _offsets_in(prompt, [names.token_bytes.get(token_id) for token_id in ids]),
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
        "tokens": texts,
        "top_logprobs": [
            None if entry is None else _top_of(_with_tops(entry, most), text, names)
            for entry, text in zip(entries, texts, strict=True)
        ],
    }


def prompt_logprobs(
    entries: Sequence[LogprobEntry | None], most: int, token_bytes: TokenBytes
) -> list[orjson.Fragment | None]:
    """Return vLLM's prompt_logprobs: for each prompt token an object, by id, of the token and of the `most` likeliest
    tokens at its place, of which it may be one. A token without an entry, such as the first token, gets None."""
    return [None if entry is None else _prompt_token(_with_tops(entry, most), token_bytes) for entry in entries]


def _offsets_in(prompt: str, pieces: Sequence[bytes]) -> list[int]:
    """Return the offset in the prompt's text at which each token begins. A token is searched at the end of the one
    before, and up to 8 characters further on. A token that is not found there, such as a special token, takes no
    room."""
    decoder, offset, offsets = getincrementaldecoder("utf-8")("replace"), 0, list[int]()
    for piece in pieces:
        text = decoder.decode(piece)
        # A tokenizer may put a space before a text, or normalise it: a little further on is near enough.
        at = prompt.find(text, offset, offset + len(text) + _MOST_SHIFT)
        offsets.append(max(at, offset))
        offset = at + len(text) if at >= 0 else offset
    return offsets


def _with_tops(entry: LogprobEntry, most: int) -> LogprobEntry:
    """Return the entry with only its `most` likeliest alternatives."""
    return replace(entry, top_ids=entry.top_ids[:most], top_logprobs=entry.top_logprobs[:most])


def _prompt_token(entry: LogprobEntry, token_bytes: TokenBytes) -> orjson.Fragment:
    """Return one prompt token, then its alternatives, as vLLM's JSON object: from id to logprob, rank and text. An
    alternative that is the token itself is left out."""
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += zip(entry.top_ids, entry.top_logprobs, range(1, len(entry.top_ids) + 1), strict=True)
    found: dict[str, dict[str, Any]] = {}
    for token_id, logprob, rank in ranked:
        told = {"logprob": _finite(logprob), "rank": rank, "decoded_token": token_text(token_bytes.get(token_id))}
        found.setdefault(str(token_id), told)
    return written(found)


def chat_logprobs(entries: Sequence[LogprobEntry], names: TokenNames) -> dict[str, Any]:
    """Return chat's logprobs object: `content` has one object per token."""
    return {"content": chat_tokens(entries, names)}


def chat_tokens(entries: Sequence[LogprobEntry], names: TokenNames) -> list[orjson.Fragment]:
    """Convert each entry to the object that chat's logprobs have for a token: name, logprob, bytes, and the same of
    each alternative, which may be the token itself."""
    found = []
    for entry in entries:
        tops = zip(entry.top_ids, entry.top_logprobs, strict=True)
        told = _chat_token(entry.token_id, entry.logprob, names)
        found.append(written({**told, "top_logprobs": [_chat_token(top, logprob, names) for top, logprob in tops]}))
    return found


def _top_of(entry: LogprobEntry, token: str, names: TokenNames) -> orjson.Fragment:
    """Return the alternatives of an entry as a JSON object from names to logprobs. Of two with the same name, the
    likelier counts. The chosen `token` is always included."""
    top: dict[str, float] = {}
    for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
        top.setdefault(names.of(token_id), _finite(logprob))
    top.setdefault(token, _finite(entry.logprob))
    return written(top)


def _chat_token(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    """Return name, logprob and bytes of one token, as chat's logprobs have them."""
    return {
        "token": names.of(token_id),
        "logprob": _finite(logprob),
        "bytes": list(names.token_bytes.get(token_id)),
    }


def _finite(logprob: float) -> float:
    return max(logprob, _FLOOR)
