"""tokenizer.json of a SentencePiece vocabulary (`tokenizer.ggml.model` llama): tokens with scores, bytes as a last way.

SentencePiece joins the neighbours whose union has the best score. As merges: each token in two parts that are tokens,
in the order of scores (after transformers' conversion of such vocabularies).
"""

from __future__ import annotations

from typing import Any

from quire_tokenizer.gguf.token_list import NORMAL, TokenList

_SCORES = "tokenizer.ggml.scores"
_SPACE = "\u2581"
# No token is longer; a bound for the number of ways in which one can be cut in two.
_MOST_CHARS = 256


def sentence_piece_json(tokens: TokenList) -> dict[str, Any]:
    """The whole tokenizer. Raises ConfigError."""
    metadata = tokens.metadata
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    bos = metadata.flag("tokenizer.ggml.add_bos_token", True)
    eos = metadata.flag("tokenizer.ggml.add_eos_token", False)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = {"type": "Prepend", "prepend": _SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
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
        "post_processor": tokens.around(bos=bos, eos=eos),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": tokens.text_of("unknown"),
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
    """Pairs, best ones first. Only normal tokens come out of merges: others are never made of their text."""
    scores = [float(score) for score in tokens.metadata.numbers(_SCORES).tolist()]
    if len(scores) != len(tokens.tokens):
        raise tokens.metadata.bad(_SCORES, f"a list of {len(tokens.tokens)}, as there are tokens")
    ids = tokens.vocabulary
    found: list[tuple[float, int, int, str, str]] = []
    for i, (text, kind) in enumerate(zip(tokens.tokens, tokens.types, strict=True)):
        if kind != NORMAL or len(text) > _MOST_CHARS:
            continue
        for at in range(1, len(text)):
            left, right = text[:at], text[at:]
            if left in ids and right in ids:
                found.append((-scores[i], i, ids[left], left, right))
    found.sort(key=lambda each: each[:3])
    return [(left, right) for _, _, _, left, right in found]
