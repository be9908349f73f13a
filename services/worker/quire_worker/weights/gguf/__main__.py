"""`python -m quire_worker.weights.gguf FILE`: prints a GGUF file's fields of config.json, for `quire plan`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from quire_common.errors import QuireError
from quire_common.gguf import open_gguf
from quire_worker.weights.gguf.config_fields import read_config

_EXIT_FAILED = 1


def main(argv: Sequence[str]) -> int:
    """Read the header of the GGUF file that the only argument names, and print one line of JSON: the numbers, booleans
    and texts of its config. If the worker refuses the file, the line has `code`, `message` and `fix` of the error
    instead. Returns the exit code: 0, or 1 after an error."""
    (path,) = argv
    try:
        config = read_config(open_gguf(Path(path)))
    except QuireError as error:
        print(json.dumps({"code": error.code, "message": error.message, "fix": error.fix}))
        return _EXIT_FAILED
    print(json.dumps({name: value for name, value in config.fields.items() if isinstance(value, int | float | str)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
