"""tokenizer.json of a SentencePiece vocabulary (`tokenizer.ggml.model` llama): tokens with scores, with byte fallback.

SentencePiece joins the two neighbours whose union has the best score. tokenizer.json has merges instead. Each normal
token becomes a merge of every pair of tokens that make it up, in the order of the scores (after transformers'
conversion of such vocabularies).

Limit: of neighbours with equal scores, SentencePiece and llama.cpp join the leftmost pair first, and merges join the
pair of the smaller id. With the tokens a, b, c, bc and ab, where bc and ab have one score, `abc` gives `a bc` here and
`ab c` there. In a trained vocabulary, scores differ from token to token.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quire_common.errors import Unsupported
from quire_common.gguf.token_ids import TokenType
from quire_common.gguf.tokenizer.token_list import TokenList

_SCORES = "tokenizer.ggml.scores"
_SPACE_MARKER = "\u2581"
# A longer token is refused: there are as many ways to split a token in two as it has characters.
_MOST_CHARS = 256


def sentence_piece_json(tokens: TokenList) -> dict[str, Any]:
    """Return the whole tokenizer as the content of a tokenizer.json: BPE with byte fallback, and merges made from the
    scores. Spaces become U+2581, with one before each text unless the file says otherwise. Raises ConfigError if scores
    are missing, not one for each token or not finite, or a token that is to be added to texts is missing. Raises
    Unsupported for a normal token of more than 256 characters."""
    metadata = tokens.metadata
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE_MARKER}
    prepend = {"type": "Prepend", "prepend": _SPACE_MARKER}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE_MARKER}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": tokens.added_tokens(),
        "normalizer": {"type": "Sequence", "normalizers": [prepend, replace]} if prefix else replace,
        "pre_tokenizer": None,
        "post_processor": tokens.post_processor(adds_bos=True, default_of="SentencePiece"),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": tokens.special_token_text("unknown"),
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": tokens.vocabulary,
            "merges": _merges(tokens),
        },
    }


def _merges(tokens: TokenList) -> list[tuple[str, str]]:
    """Return the pairs of tokens that make up each normal token, best score first, then by the ids of the token and of
    its left part. The parts may be tokens of any type. Raises Unsupported for a normal token of more than 256
    characters, and ConfigError as `_scores` does."""
    scores = _scores(tokens)
    ids = tokens.vocabulary
    found: list[tuple[float, int, int, str, str]] = []
    for i, (text, kind) in enumerate(zip(tokens.tokens, tokens.types, strict=True)):
        if kind != TokenType.NORMAL:
            continue
        if len(text) > _MOST_CHARS:
            raise Unsupported(
                "UNSUPPORTED_TOKENIZER",
                f"{tokens.metadata.path} has a token of {len(text)} characters (id {i}); at most {_MOST_CHARS} are "
                "supported.",
                "Name a folder with tokenizer.json by --tokenizer.",
                param="model",
            )
        for at in range(1, len(text)):
            left, right = text[:at], text[at:]
            if left in ids and right in ids:
                found.append((-scores[i], i, ids[left], left, right))
    found.sort(key=lambda each: each[:3])
    return [(left, right) for _, _, _, left, right in found]


def _scores(tokens: TokenList) -> list[float]:
    """Return the score of each token. Raises ConfigError unless there is one finite score for each token."""
    metadata = tokens.metadata
    scores = metadata.numbers(_SCORES)
    if len(scores) != len(tokens.tokens):
        raise metadata.bad(_SCORES, f"one score for each of the {len(tokens.tokens)} tokens")
    if not np.isfinite(scores).all():
        raise metadata.fault(f"`{_SCORES}` holds a score that is not finite")
    return [float(score) for score in scores.tolist()]
