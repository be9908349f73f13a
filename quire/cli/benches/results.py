"""Where a benchmark's result goes: JSON on standard output or in a file, by vLLM's flags."""

from __future__ import annotations

import argparse
import json
from datetime import datetime
from pathlib import Path
from typing import Any


def add_file_argument(parser: argparse.ArgumentParser) -> None:
    """`--output-json`, of the benchmarks that start an engine of their own."""
    parser.add_argument("--output-json", metavar="FILE", help="write the result there too")


def finish(args: argparse.Namespace, report: dict[str, Any]) -> int:
    """Print the report, and write it where `--output-json` says too. Returns the exit code 0."""
    text = json.dumps(report, indent=1)
    if args.output_json:
        Path(args.output_json).write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def stamp() -> str:
    """Now, as vLLM writes it into results."""
    return datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
