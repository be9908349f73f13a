"""Writes docs/parameters.md: the parameters of a request, from the table that everything else derives from.

`python -m tools.parameters_table` writes the file. A test fails if the file is out of date.
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
    """Return the whole page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Parameters of a request"
    yield ""
    yield "A parameter has the same name in Python (`quire.SamplingParams`) and in HTTP bodies. Over gRPC, a parameter"
    yield "is a field of `quire.v1.GenerateRequest`. The column *gRPC field* has the path of this field."
    yield ""
    yield "The routes `/v1/completions`, `/v1/chat/completions` and `/inference/v1/generate` take all parameters. The"
    yield "route `/v1/responses` takes the parameters that have *responses* in the column *other APIs*. The route"
    yield "`/v1/messages` takes the parameters that have *messages* in this column."
    yield ""
    yield "The worker first divides the logits by `temperature`. Then the worker removes tokens by `min_p`, `top_k`,"
    yield "`top_p` and `typical_p`, in this order. Each of these four applies to the tokens that the earlier ones left."
    yield ""
    yield "A model's file generation_config.json may contain the model's own defaults for these parameters:"
    yield f"{', '.join(_model_default(each) for each in MODEL_DEFAULTS)}."
    yield ""
    yield "| request | values of generation_config.json that replace the defaults of this page |"
    yield "|---|---|"
    yield "| `/v1/completions` | all except `max_tokens`, whose default is always 16 |"
    yield "| beam search over HTTP | only `temperature` |"
    yield "| `/inference/v1/generate`, gRPC | none |"
    yield "| other HTTP requests | all |"
    yield "| `LLM.generate` | all if you pass no sampling parameters, else none |"
    yield ""
    yield "| option of `LLM` or `quire serve` | effect |"
    yield "|---|---|"
    yield "| `--generation-config vllm` | Quire ignores the model's defaults. |"
    yield "| `--generation-config FOLDER` | Quire reads the model's defaults from this folder. |"
    yield "| `--override-generation-config '{\"top_k\": 20}'` | Values in this JSON replace the model's defaults. |"
    yield ""
    yield "[limits.md](limits.md) lists the limits of the other fields of requests. `python -m tools.parameters_table`"
    yield "generates this page from `quire/request_parameters.py`."
    yield ""
    yield "| parameter | meaning | default | limit | gRPC field | other APIs |"
    yield "|---|---|---|---|---|---|"
    for each in PARAMETERS:
        default = "" if each.default in (None, ()) else f"{each.default}".lower()
        routes = ", ".join(each.also_in)
        yield f"| {each.name} | {each.description} | {default} | {_bounds(each)} | {each.wire} | {routes} |"


def _model_default(parameter: Parameter) -> str:
    """Return a parameter's name, followed by its name in generation_config.json if that differs."""
    other = parameter.generation_config
    return f"`{parameter.name}`" + (f" (in the file: `{other}`)" if other != parameter.name else "")


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
