"""GGUF files: their headers, which are read within bounds, typed metadata, and the places of tensors. Only the worker
reads the values of tensors."""

from __future__ import annotations

from quire_common.gguf.block_kinds import BLOCK_KINDS, BlockKind
from quire_common.gguf.header import GgufFile, TensorPlace, read_header
from quire_common.gguf.metadata import Metadata
from quire_common.gguf.model_file import GgufModel, gguf_files, is_gguf, open_gguf
from quire_common.gguf.text_array import TextArray

__all__ = [
    "BLOCK_KINDS",
    "BlockKind",
    "GgufFile",
    "GgufModel",
    "Metadata",
    "TensorPlace",
    "TextArray",
    "gguf_files",
    "is_gguf",
    "open_gguf",
    "read_header",
]
