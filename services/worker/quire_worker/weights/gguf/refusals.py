"""The error for a key of a GGUF file that asks for something that the worker does not compute."""

from __future__ import annotations

from quire_common.errors import Unsupported
from quire_common.gguf import Metadata

FIX = "Serve another model, or its safetensors folder."


def refused(metadata: Metadata, key: str) -> Unsupported:
    """Make the error (UNSUPPORTED_CONFIG) for a key whose value the worker does not support; the caller raises it."""
    return Unsupported(
        "UNSUPPORTED_CONFIG",
        f"{metadata.path}: `{key}` is {metadata.shown(key)}, which asks for what is not supported.",
        FIX,
        param=key,
    )
