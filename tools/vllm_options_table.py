"""Writes docs/vllm-options.md: the meaning of each of vLLM's option names in Quire, from the tables that flags derive
from.

`python -m tools.vllm_options_table` writes the file. A test fails if the file is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quire.engine_options import ENGINE_OPTIONS
from quire.vllm_options import VLLM_OPTIONS, VllmOption

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCUMENT = Path(__file__).parent.parent / "docs" / "vllm-options.md"
# Options of ENGINE_OPTIONS that vLLM does not have.
_OURS = ("insecure", "kvstore-", "lockstep", "paced", "batch-invariant", "vllm-grpc", "share-prefix", "redis",
         "requests-per", "tokens-per", "metrics-", "max-body", "max-n", "request-timeout", "worker-timeout",
         "torch-threads", "log-level", "device", "api-key-file", "max-bodies", "quantize", "otlp-tls-ca",
         "otlp-sampling")  # fmt: skip  # a list of beginnings
_EXACT = ("max-num-seqs", "max-num-batched-tokens", "max-num-partial-prefills")


def document() -> str:
    """Return the whole page."""
    return "\n".join(_lines()).rstrip() + "\n"


def _lines() -> Iterator[str]:
    yield "# vLLM's options"
    yield ""
    yield "`LLM(...)`, `quire serve` and `quire up` accept the option names of vLLM 0.24. For an unknown option, Quire"
    yield "prints an error that suggests the most similar name. `quire serve --help` lists all options, also those that"
    yield "vLLM does not have."
    yield ""
    yield "`python -m tools.vllm_options_table` generates this page from `quire/vllm_options.py` and"
    yield "`quire/engine_options.py`."
    yield ""
    yield "## Supported"
    yield ""
    yield "These options have the same purpose as in vLLM."
    yield ""
    yield "| option | meaning |"
    yield "|---|---|"
    for engine in ENGINE_OPTIONS:
        if engine.name in _EXACT or not engine.name.startswith(_OURS):
            yield f"| `--{engine.name}` | {_cell(engine.help)} |"
    yield ""
    for title, kind, intro, header in _SECTIONS:
        yield f"## {title}"
        yield ""
        yield intro
        yield ""
        yield header
        yield "|" + "---|" * (header.count("|") - 1)
        yield from (_row(option) for option in VLLM_OPTIONS if option.kind == kind)
        yield ""


_SECTIONS = (
    (
        "Translated",
        "translated",
        "For each of these options, Quire sets an option of its own, which has another name.",
        "| option | meaning | Quire's option |",
    ),
    (
        "Ignored",
        "accepted",
        "Quire accepts these options, but they have no effect.",
        "| option | why it has no effect |",
    ),
    (
        "Accepted with some values only",
        "neutral values",
        "Quire accepts only the values in the column *accepted values*. These values mean what Quire does anyway.",
        "| option | accepted values | why other values are refused | what to do instead |",
    ),
    (
        "Refused",
        "refused",
        "Quire refuses these options, whatever their value.",
        "| option | why | what to do instead |",
    ),
)


def _row(option: VllmOption) -> str:
    cells = [_names(option), option.reason]
    if option.kind == "neutral values":
        cells.insert(1, ", ".join(option.neutral))
    if option.kind != "accepted":
        cells.append(option.nearest or "Leave it out.")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _names(option: VllmOption) -> str:
    return f"`--{option.name}`" + "".join(f", `-{alias}`" for alias in option.aliases)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    """Write the page."""
    DOCUMENT.write_text(document())
    return 0


if __name__ == "__main__":
    sys.exit(main())
