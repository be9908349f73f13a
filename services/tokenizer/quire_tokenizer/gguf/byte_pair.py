"""tokenizer.json of a byte-level BPE vocabulary (`tokenizer.ggml.model` gpt2): tokens, merges, a way of cutting."""

from __future__ import annotations

from typing import Any

from quire_tokenizer.gguf.pre_tokenizers import find_pre_tokenizer
from quire_tokenizer.gguf.token_list import TokenList

_MERGES = "tokenizer.ggml.merges"


def byte_pair_json(tokens: TokenList) -> dict[str, Any]:
    """The whole tokenizer. Raises ConfigError or Unsupported."""
    metadata = tokens.metadata
    cut = find_pre_tokenizer(metadata)
    bos = metadata.flag("tokenizer.ggml.add_bos_token", cut.adds_bos)
    eos = metadata.flag("tokenizer.ggml.add_eos_token", False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": tokens.added_tokens(),
        "normalizer": cut.normalizer,
        "pre_tokenizer": cut.steps[0]
        if len(cut.steps) == 1
        else {"type": "Sequence", "pretokenizers": list(cut.steps)},
        "post_processor": tokens.around(bos=bos, eos=eos),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": cut.ignore_merges,
            "vocab": tokens.vocabulary,
            "merges": _merges(tokens),
        },
    }


def _merges(tokens: TokenList) -> list[tuple[str, str]]:
    """Pairs, first ones first. Each is written with a space between, which no left side begins with."""
    pairs = []
    for merge in tokens.metadata.texts(_MERGES):
        at = merge.find(" ", 1)
        if at < 0:
            raise tokens.metadata.bad(_MERGES, f"pairs with a space between, as {merge[:40]!r} is not")
        pairs.append((merge[:at], merge[at + 1 :]))
    return pairs
