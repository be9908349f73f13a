"""The fields of structured output over HTTP: OpenAI's response_format, vLLM's structured_outputs and guided_*, and the
formats of Anthropic's API and the Responses API. A request may use one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from quire_common.errors import InvalidArgument
from quire_router.front.parameters.fields import bad_type, check_fields, json_text
from quire_router.front.parameters.tables import JSON_SCHEMA, OUTPUT_FORMAT, RESPONSE_FORMAT, STRUCTURED_OUTPUTS
from quire_router.sequences.structured import PROMPT_ENDS, StructuredOutput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quire_router.sequences.structured import AnswerStructure

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def structure_of(values: Mapping[str, Any], *others: AnswerStructure | None) -> AnswerStructure | None:
    """Return the one structure that the answer must match: from `others`, or from the checked fields guided_*,
    structured_outputs or response_format; None if there is none. Raises InvalidArgument if there are several, if
    `ignore_eos` is set too, or if the structure is malformed."""
    asked: list[AnswerStructure] = [
        *(each for each in others if each is not None),
        *_of_guided(values),
        *_of_structured_outputs(values.get("structured_outputs")),
        *_of_response_format(values.get("response_format")),
    ]
    if len(asked) > 1:
        names = " and ".join(each.param for each in asked)
        raise InvalidArgument(
            "CONTRADICTION", f"{names} say what the answer must match.", "Send one of them.", param=asked[1].param
        )
    if asked and values.get("ignore_eos"):
        raise InvalidArgument(
            "CONTRADICTION",
            f"{asked[0].param} says where the answer ends, and ignore_eos that it does not end there.",
            "Leave ignore_eos out.",
            param="ignore_eos",
        )
    return asked[0] if asked else None


def of_output_format(form: Mapping[str, Any] | None, param: str) -> StructuredOutput | None:
    """Return the structure of a flat format of Anthropic's API or the Responses API, in which `schema`, `name` and
    `strict` stand beside `type`. None for the type `text` and without a format. `param` is the client's field. Raises
    InvalidArgument for another type than json_object, json_schema or text, for a schema that is no object or boolean,
    and for unknown fields."""
    if form is None:
        return None
    values = check_fields(form, OUTPUT_FORMAT)
    kind = _type_of(values["type"], ("text", "json_object", "json_schema"), param)
    if kind == "json_schema":
        return _of_schema({name: value for name, value in values.items() if name != "type"}, param)
    return StructuredOutput(kind, param=param) if kind == "json_object" else None


def structured_outputs_of(structure: StructuredOutput) -> dict[str, Any]:
    """Return vLLM's `structured_outputs` object with the same meaning, with fields of Quire's own if vLLM has none.
    Options at their defaults are left out."""
    kind = "json" if structure.kind == "json_schema" else structure.kind
    value: Any = structure.text
    if kind == "json_object":
        value = True
    elif kind == "choice":
        value = orjson.loads(structure.text)
    options = {
        "disable_any_whitespace": structure.disable_any_whitespace,
        "disable_additional_properties": structure.disable_additional_properties,
        "whitespace_pattern": structure.whitespace_pattern,
        "strict": structure.strict,
        "prompt_end": structure.prompt_end,
    }
    return {kind: value, **{name: option for name, option in options.items() if option}}


def _of_guided(values: Mapping[str, Any]) -> list[StructuredOutput]:
    """Return a structure for each of vLLM's older fields that is set: guided_json, guided_regex, guided_choice and
    guided_grammar. `guided_whitespace_pattern` applies to each. Raises InvalidArgument for a wrong type."""
    pattern = values.get("guided_whitespace_pattern") or ""
    return [
        _structured_output(kind, values[name], name, {"whitespace_pattern": pattern})
        for name, kind in _GUIDED.items()
        if values.get(name) is not None
    ]


def _of_structured_outputs(given: Mapping[str, Any] | None) -> list[StructuredOutput]:
    """Return the structure of vLLM's `structured_outputs` as a list of one; empty without the field. Raises
    InvalidArgument unless the object has exactly one kind of structure that is neither null nor false, and for unknown
    fields, a value of a wrong type or an unknown `prompt_end`."""
    if given is None:
        return []
    values = check_fields(given, STRUCTURED_OUTPUTS)
    kinds = [kind for kind in _KINDS if values[kind] not in (None, False)]
    if len(kinds) != 1:
        said = " and ".join(kinds) or "nothing"
        raise InvalidArgument(
            "CONTRADICTION",
            f"structured_outputs has {said}.",
            f"Send one of {', '.join(_KINDS)}.",
            param="structured_outputs",
        )
    if values["prompt_end"]:
        _one_of(values["prompt_end"], PROMPT_ENDS, "structured_outputs.prompt_end")
    return [_structured_output(kinds[0], values[kinds[0]], f"structured_outputs.{kinds[0]}", values)]


def _of_response_format(given: Mapping[str, Any] | None) -> list[StructuredOutput]:
    """Return the structure of OpenAI's `response_format` as a list of one; empty without the field and for the type
    `text`. A structural tag is passed on as the whole object. Raises InvalidArgument for unknown fields, for a type
    other than text, json_object, json_schema and structural_tag, and for a schema that is missing or is no object or
    boolean."""
    if given is None:
        return []
    values = check_fields(given, RESPONSE_FORMAT)
    param = "response_format"
    kind = _type_of(values["type"], ("text", "json_object", "json_schema", "structural_tag"), param)
    if kind == "text":
        return []
    if kind == "structural_tag":
        return [StructuredOutput(kind, json_text(param, given), param=param)]
    if kind == "json_object":
        return [StructuredOutput(kind, param=param)]
    if values["json_schema"] is None:
        raise InvalidArgument(
            "MISSING_FIELD",
            "response_format has no json_schema.",
            'Send {"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}.',
            param="response_format.json_schema",
        )
    return [_of_schema(check_fields(values["json_schema"], JSON_SCHEMA), "response_format.json_schema")]


def _of_schema(values: Mapping[str, Any], param: str) -> StructuredOutput:
    """Return the structure of a JSON schema from the checked members `schema` and `strict`. `param` is the client's
    field around them. Raises InvalidArgument unless the schema is an object or a boolean."""
    schema, param = values["schema"], f"{param}.schema"
    if not isinstance(schema, dict | bool):
        raise bad_type(param, schema, "an object")
    return StructuredOutput("json_schema", json_text(param, schema), strict=values["strict"], param=param)


def _structured_output(kind: str, value: Any, param: str, options: Mapping[str, Any]) -> StructuredOutput:
    """Make the structured output of one of vLLM's fields (`kind`, `json` for example) from its value and the options
    beside it. `param` is the client's field. Only the value's type is checked here: the tokenizer checks its content.
    Raises InvalidArgument for a wrong type."""
    return StructuredOutput(
        "json_schema" if kind == "json" else kind,
        _text_of(kind, value, param),
        disable_any_whitespace=bool(options.get("disable_any_whitespace")),
        disable_additional_properties=bool(options.get("disable_additional_properties")),
        whitespace_pattern=options.get("whitespace_pattern") or "",
        strict=bool(options.get("strict")),
        prompt_end=options.get("prompt_end") or "",
        param=param,
    )


def _text_of(kind: str, value: Any, param: str) -> str:
    """Return a value as the text of a constraint: choices become a JSON list, objects become JSON, strings stay. As in
    vLLM, JSON may be given as text. A json_object has no text. Raises InvalidArgument for a wrong type. `param` is the
    client's field, for the error."""
    if kind == "json_object":
        return ""
    if kind == "choice":
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise bad_type(param, value, "a list of strings")
        return json_text(param, value)
    if isinstance(value, str):
        return value
    if kind in ("json", "structural_tag") and isinstance(value, dict):
        return json_text(param, value)
    raise bad_type(param, value, "a string" if kind in ("regex", "grammar") else "an object or a string")


def _type_of(kind: Any, known: tuple[str, ...], param: str) -> str:
    return _one_of(kind, known, f"{param}.type")


def _one_of(value: Any, known: tuple[str, ...], param: str) -> str:
    """Return the value if it is one of `known`. Raises InvalidArgument, naming `param`, otherwise."""
    if value not in known:
        shown = json_text(param, value)[:50]
        raise InvalidArgument("BAD_VALUE", f"{param} is {shown}.", f"Choose one of {', '.join(known)}.", param=param)
    return str(value)
