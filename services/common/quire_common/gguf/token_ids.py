"""The tokens that a GGUF file gives a part to: ends of answers, and others by name."""

from __future__ import annotations

from typing import Final

from quire_common.gguf.metadata import Metadata

_ENDS: Final = ("eos", "eot", "eom")
"""End of the text, of a turn, of a message: an answer ends with any of them."""
_PREFIX = "tokenizer.ggml."


def end_token_ids(metadata: Metadata) -> tuple[int, ...]:
    """Ids of the tokens that end an answer, in the order of the parts."""
    found = (token_id(metadata, part) for part in _ENDS)
    return tuple(dict.fromkeys(each for each in found if each is not None))


def token_id(metadata: Metadata, part: str) -> int | None:
    """The id of the token of a part (bos, eos, unknown, padding and so on), None where the file names none."""
    key = f"{_PREFIX}{part}_token_id"
    return metadata.integer(key) if key in metadata else None
