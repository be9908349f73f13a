"""Writes a benchmark's result as JSON to standard output or to a file, by vLLM's flags."""

from __future__ import annotations

import argparse
import json
from datetime import datetime
from pathlib import Path
from typing import Any

from quire.errors import FailedPrecondition


def add_file_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--output-json`, for benchmarks that start their own engine."""
    parser.add_argument("--output-json", metavar="FILE", help="write the result there too")


def finish(args: argparse.Namespace, report: dict[str, Any]) -> int:
    """Print the report as JSON, then write it to the file that `--output-json` names, if any. Returns the exit code 0.
    Raises FailedPrecondition if the file cannot be written."""
    text = json.dumps(report, indent=1)
    print(text, flush=True)
    if args.output_json:
        write_result(Path(args.output_json), text + "\n")
    return 0


def write_result(path: Path, text: str, *, append: bool = False) -> None:
    """Replace the file by this text, or append the text to it; the folder is made if needed. Raises FailedPrecondition
    if that fails. Callers print the result before, as the error says."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise FailedPrecondition(
            "RESULT_FILE", f"Cannot write {path}: {error.strerror}.", "The result is printed above. Give another file."
        ) from error


def stamp() -> str:
    """Return the present time in vLLM's format of results."""
    return datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
