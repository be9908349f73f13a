"""Writes a benchmark's result as JSON to standard output or to a file, by vLLM's flags."""

from __future__ import annotations

import argparse
import json
from datetime import datetime
from pathlib import Path
from typing import Any


def add_file_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--output-json`, for benchmarks that start their own engine."""
    parser.add_argument("--output-json", metavar="FILE", help="write the result there too")


def finish(args: argparse.Namespace, report: dict[str, Any]) -> int:
    """Write the report as JSON to the file that `--output-json` names, if any, then print it. If the file cannot be
    written, the OSError passes on and nothing is printed. Returns the exit code 0."""
    text = json.dumps(report, indent=1)
    if args.output_json:
        Path(args.output_json).write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def stamp() -> str:
    """Return the present time in vLLM's format of results."""
    return datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
