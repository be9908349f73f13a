"""The errors of GGUF files. Each names the file, the cause and the fix. A `cause` is a clause without a full stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.errors import ConfigError, Unsupported

if TYPE_CHECKING:
    from pathlib import Path

_FETCH = "Download the file again."
CONVERT = "Convert the model with a current llama.cpp."
CONVERT_AGAIN = "Download the file again, or convert the model with a current llama.cpp."


def truncated(path: Path, cause: str) -> ConfigError:
    """The file ends too early."""
    return ConfigError("TRUNCATED_GGUF", f"{path} is cut short: {cause}.", _FETCH)


def corrupt(path: Path, cause: str) -> ConfigError:
    """The file contradicts itself or the format."""
    return ConfigError("CORRUPT_GGUF", f"{path} is damaged: {cause}.", _FETCH)


def unsupported(path: Path, cause: str, fix: str) -> Unsupported:
    """The file has a form of the format that the reader does not support."""
    return Unsupported("UNSUPPORTED_GGUF", f"{path} is not supported: {cause}.", fix)


def unreadable(path: Path, error: OSError) -> ConfigError:
    """The system refuses to open or read the file; the message has the system's reason."""
    return ConfigError(
        "UNREADABLE_FILE", f"{path} cannot be read: {error.strerror}.", "Check the path and its permissions."
    )
