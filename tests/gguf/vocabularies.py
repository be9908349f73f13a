"""GGUF files that hold a tokenizer and no tensors, written by the gguf package from tokenizers trained here."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf import GGUFWriter
from tokenizers import Tokenizer

from tests.unit.tokenizer import folders

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
_ALPHABET = [
    *"abcXYZé ß's't 're 0123456789 ..,,!?-_(){}<>|/\\\n\n\r\t  ",
    "the ", "The", " dog", "question", "汉字", "你好", "こ", "😀", "e\u0301", "  ", "   ", "\u3000", "²", "Ⅷ", "٣",
]  # fmt: skip  # a list of texts


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Texts of 0 to 40 pieces: letters, digits, marks, spaces of many kinds."""
    choose = random.Random(seed)
    return ["".join(choose.choices(_ALPHABET, k=choose.randint(0, 40))) for _ in range(count)]


@dataclass
class TextFile:
    """What is written. `change` replaces values of keys behind `tokenizer.`; None leaves a key out."""

    tokenizer: Tokenizer
    model: str = "gpt2"
    pre: str = "gpt-2"
    architecture: str = "llama"
    change: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        """Write the file, and return its path."""
        writer = GGUFWriter(path, self.architecture)
        self.add_to(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path

    def add_to(self, writer: GGUFWriter) -> None:
        """Add the keys to a file that is being written."""
        for key, value in (self.values() | self.change).items():
            key = f"tokenizer.{key}"
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            elif value is not None:
                writer.add_array(key, value)

    def values(self) -> dict[str, Any]:
        """Keys behind `tokenizer.`, before `change`."""
        shape = json.loads(self.tokenizer.to_str())
        ids = self.tokenizer.get_vocab(with_added_tokens=True)
        tokens = sorted(ids, key=lambda text: ids[text])
        special = {token["content"]: token["special"] for token in shape["added_tokens"]}
        kinds = {True: CONTROL, False: USER_DEFINED}
        types = [kinds[special[text]] if text in special else NORMAL for text in tokens]
        found: dict[str, Any] = {
            "ggml.model": self.model,
            "ggml.tokens": tokens,
            "ggml.token_type": types,
            "ggml.bos_token_id": ids[folders.BOS],
            "ggml.eos_token_id": ids[folders.EOS],
            "ggml.eot_token_id": ids[folders.TURN_END],
            "chat_template": folders.TEMPLATE,
        }
        if self.model == "gpt2":
            merges = [" ".join(pair) for pair in shape["model"]["merges"]]
            return found | {"ggml.pre": self.pre, "ggml.merges": merges}
        made = {left + right: rank for rank, (left, right) in enumerate(shape["model"]["merges"])}
        found["ggml.scores"] = [-float(made.get(text, 1000)) for text in tokens]
        found["ggml.token_type"] = [
            UNKNOWN if text == "<unk>" else BYTE if text.startswith("<0x") else kind
            for text, kind in zip(tokens, types, strict=True)
        ]
        return found | {"ggml.unknown_token_id": ids["<unk>"]}
