"""Writes docs/parameters.md: the parameters of a request, from the table that everything else derives from.

`python -m tools.parameters_table` writes the file; a test fails where it is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quire_common.request_parameters import MAX_INT32, PARAMETERS, Parameter
from quire_router.front.parameters.fields import Field
from tools.limits_table import bound_of

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCUMENT = Path(__file__).parent.parent / "docs" / "parameters.md"


def document() -> str:
    """The whole page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# The parameters of a request"
    yield ""
    yield "A parameter has one name in Python (`quire.SamplingParams`), in HTTP bodies and in gRPC. `/v1/completions`,"
    yield "`/v1/chat/completions` and `/inference/v1/generate` take all of them; the last column names other routes."
    yield "gRPC: the field of `quire.v1.GenerateRequest`. Bounds of lists and products: [limits.md](limits.md)."
    yield ""
    yield "Limits apply in this order: `temperature`, `min_p`, `top_k`, `top_p`, `typical_p`. A limit counts only what"
    yield "those before have kept."
    yield ""
    yield "`quire/request_parameters.py` is the table; `python -m tools.parameters_table` writes this page from it."
    yield ""
    yield "| parameter | meaning | default | bounds | gRPC field | also in |"
    yield "|---|---|---|---|---|---|"
    for each in PARAMETERS:
        default = "" if each.default in (None, ()) else f"{each.default}".lower()
        routes = ", ".join(each.also_in)
        yield f"| {each.name} | {each.description} | {default} | {_bounds(each)} | {each.wire} | {routes} |"


def _bounds(parameter: Parameter) -> str:
    field = Field(parameter.kind, low=parameter.low, high=parameter.high, max_items=parameter.max_items)
    if parameter.above_low:
        return "above " + bound_of(field).replace(" to ", ", to ")
    if parameter.kind == "int" and parameter.high >= MAX_INT32:
        return f"from {parameter.low:g}" if abs(parameter.low) < MAX_INT32 else "64 bits"
    return parameter.limit or bound_of(field)


def main() -> int:
    """Write the page."""
    DOCUMENT.write_text(document())
    return 0


if __name__ == "__main__":
    sys.exit(main())
