"""tokenizer.json of a byte-level BPE vocabulary (`tokenizer.ggml.model` gpt2): tokens, merges, a pre-tokenizer."""

from __future__ import annotations

from typing import Any

from quire_common.gguf.tokenizer.pre_tokenizers import PRE_TOKENIZER_NAME, find_pre_tokenizer
from quire_common.gguf.tokenizer.token_list import TokenList

_MERGES = "tokenizer.ggml.merges"


def byte_pair_json(tokens: TokenList) -> dict[str, Any]:
    """Return the whole tokenizer as the content of a tokenizer.json, with the steps of the file's pre-tokenizer. Raises
    ConfigError if the merges are missing or damaged, or a token that is to be added to texts is missing. Raises
    Unsupported if the file names an unknown pre-tokenizer, or none."""
    found = find_pre_tokenizer(tokens.metadata)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": tokens.added_tokens(),
        "normalizer": found.normalizer,
        "pre_tokenizer": found.steps[0]
        if len(found.steps) == 1
        else {"type": "Sequence", "pretokenizers": list(found.steps)},
        "post_processor": tokens.post_processor(
            adds_bos=found.adds_bos, default_of=f"the pre-tokenizer {tokens.metadata.text(PRE_TOKENIZER_NAME)}"
        ),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": found.ignore_merges,
            "vocab": tokens.vocabulary,
            "merges": _merges(tokens),
        },
    }


def _merges(tokens: TokenList) -> list[tuple[str, str]]:
    """Return the merges as pairs of texts, in the order in which they apply. Raises ConfigError if the merges are
    missing, or one has no space after its first character.

    Left and right are separated by the first space after the first character, because a left side may itself start with
    a space (llama.cpp's rule).
    """
    pairs = []
    for merge in tokens.metadata.texts(_MERGES):
        at = merge.find(" ", 1)
        if at < 0:
            raise tokens.metadata.fault(f"`{_MERGES}` holds {merge[:40]!r}, which has no space between two texts")
        pairs.append((merge[:at], merge[at + 1 :]))
    return pairs
