"""Reads a GGUF file's config.json fields with the worker's reader, which runs in a separate process.

This package does not import the worker. So the fields are what the worker serves, and a file that the worker refuses is
refused here, with the same error.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from quire.errors import FailedPrecondition, InvalidArgument

_MAGIC: Final = b"GGUF"
_COMMAND: Final = ("-P", "-m", "quire_worker.weights.gguf")


def is_gguf(path: Path) -> bool:
    """Return whether the path is a file that ends in .gguf, in any case, or begins with GGUF's magic bytes. False for a
    file of another name that cannot be read."""
    try:
        if path.suffix.lower() == ".gguf":
            return path.is_file()
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def read_gguf_fields(path: Path) -> dict[str, Any]:
    """Return the numbers, booleans and texts of a GGUF file's config, by their names in config.json. Raises
    InvalidArgument, with the worker's code, cause and fix, if the worker refuses the file, and FailedPrecondition if
    the worker's package cannot be run here."""
    done = subprocess.run(
        [sys.executable, *_COMMAND, str(path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    try:
        fields: dict[str, Any] = json.loads(done.stdout)
        if done.returncode:
            raise InvalidArgument(fields["code"], fields["message"], fields["fix"], param="model")
    except (ValueError, KeyError, TypeError) as error:
        cause = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise FailedPrecondition(
            "NO_GGUF_READER",
            f"{path} is a GGUF file, and the worker's package, which reads it, cannot be run: {cause}.",
            "Install quire-worker here, or give the folder of the model from which the file was made.",
            param="model",
        ) from error
    return fields
