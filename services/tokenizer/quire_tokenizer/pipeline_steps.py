"""The steps of the parts of a tokenizer of the library tokenizers: its normalizer, pre-tokenizer and decoder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenizers.decoders import Decoder
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

# The keys under which a Sequence of each part has its steps in tokenizer.json.
_INNER = ("pretokenizers", "normalizers", "decoders")


def pipeline_steps(part: PreTokenizer | Normalizer | Decoder | None) -> list[dict[str, Any]]:
    """Return a part of a tokenizer as a flat list of steps, each with its `type`. A part that is None has no steps."""
    return [] if part is None else _flat(json.loads(part.__getstate__()))


def _flat(shape: Mapping[str, Any]) -> list[dict[str, Any]]:
    if shape["type"] != "Sequence":
        return [dict(shape)]
    return [step for key in _INNER for inner in shape.get(key, ()) for step in _flat(inner)]
