"""Writes docs/parameters.md: the parameters of a request, from the table that everything else derives from.

`python -m tools.parameters_table` writes the file; a test fails where it is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quire_common.request_parameters import MAX_INT32, MODEL_DEFAULTS, PARAMETERS, Parameter
from quire_router.front.parameters.fields import Field
from tools.limits_table import bound_of

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCUMENT = Path(__file__).parent.parent / "docs" / "parameters.md"


def document() -> str:
    """The whole page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Parameters of a request"
    yield ""
    yield "This page is for users. A parameter has the same name in Python (`quire.SamplingParams`) and in HTTP bodies."
    yield "Over gRPC it is a field of `quire.v1.GenerateRequest`; the column *gRPC field* gives its path."
    yield ""
    yield "`/v1/completions`, `/v1/chat/completions` and `/inference/v1/generate` take all parameters. The last column"
    yield "names other APIs that take the parameter: *responses* is `/v1/responses`, and *messages* is `/v1/messages`."
    yield ""
    yield "Some parameters keep only part of the tokens for sampling. They are applied in this order: `temperature`,"
    yield "`min_p`, `top_k`, `top_p`, `typical_p`. Each of them sees only the tokens that the one before has kept."
    yield ""
    yield "The file generation_config.json of a model may have defaults of its own for these parameters:"
    yield f"{', '.join(_model_default(each) for each in MODEL_DEFAULTS)}."
    yield "They replace the defaults below in requests over HTTP. In `/v1/completions`, `max_tokens` stays at 16, and a"
    yield "beam search takes only the temperature. `/inference/v1/generate` and gRPC take each parameter as it is sent."
    yield "`LLM.generate` uses them if it is called without sampling parameters. `--generation-config vllm` turns them"
    yield "off, `--generation-config FOLDER` reads them from another folder, and `--override-generation-config` takes"
    yield "them as JSON, for example `'{\"temperature\": 0.5}'`."
    yield ""
    yield "[limits.md](limits.md) lists the limits of all other fields. `python -m tools.parameters_table` generates"
    yield "this page from `quire/request_parameters.py`."
    yield ""
    yield "| parameter | meaning | default | limit | gRPC field | other APIs |"
    yield "|---|---|---|---|---|---|"
    for each in PARAMETERS:
        default = "" if each.default in (None, ()) else f"{each.default}".lower()
        routes = ", ".join(each.also_in)
        yield f"| {each.name} | {each.description} | {default} | {_bounds(each)} | {each.wire} | {routes} |"


def _model_default(parameter: Parameter) -> str:
    """Return a parameter's name, with the name in generation_config.json if that is another."""
    other = parameter.generation_config
    return f"`{parameter.name}`" + (f" (there `{other}`)" if other != parameter.name else "")


def _bounds(parameter: Parameter) -> str:
    field = Field(parameter.kind, low=parameter.low, high=parameter.high, max_items=parameter.max_items)
    if parameter.above_low:
        return "above " + bound_of(field).replace(" to ", ", at most ")
    if parameter.kind == "int" and abs(parameter.low) > MAX_INT32:
        return "any 64-bit number"
    if parameter.kind == "int" and parameter.high >= MAX_INT32:
        return f"{parameter.low:g} or more" + (f", {parameter.limit}" if parameter.limit else "")
    return parameter.limit or bound_of(field)


def main() -> int:
    """Write the page."""
    DOCUMENT.write_text(document())
    return 0


if __name__ == "__main__":
    sys.exit(main())
