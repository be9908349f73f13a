"""The model families whose output format Quire can parse, by vLLM's names of the parsers."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from quire_tokenizer.output_parsing import pythonic_grammar
from quire_tokenizer.output_parsing.call_grammar import CallGrammar, GrammarWriter, WantedCalls
from quire_tokenizer.output_parsing.harmony import CHANNEL, MESSAGE
from quire_tokenizer.output_parsing.json_calls import JsonCallFormat, JsonToolParser
from quire_tokenizer.output_parsing.parts import OutputParser, PartWriter
from quire_tokenizer.output_parsing.pythonic_calls import PythonicToolParser
from quire_tokenizer.output_parsing.reasoning import ReasoningMarkers
from quire_tokenizer.output_parsing.schemas import ToolSchemas
from quire_tokenizer.output_parsing.special_token_calls import SpecialTokenFormat, SpecialTokenToolParser
from quire_tokenizer.output_parsing.xml_calls import XmlCallFormat, XmlToolParser

# One parser reads both calls and reasoning of Harmony, so neither table below has it.
HARMONY = "openai"
HARMONY_REASONING = "openai_gptoss"


@dataclass(frozen=True)
class ToolFamily:
    """`make` returns a parser of one answer, `write_calls` the grammar of calls. `template_markers`: strings that all
    occur in the chat template of a model of this family; empty: the family is used only by name."""

    markers: frozenset[str]
    make: Callable[[ToolSchemas, PartWriter], OutputParser]
    write_calls: Callable[[GrammarWriter, WantedCalls], CallGrammar]
    template_markers: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReasoningFamily:
    """`assumed`: the answer begins within reasoning, unless the prompt's end says otherwise."""

    markers: ReasoningMarkers
    assumed: bool = False


def _json(call_format: JsonCallFormat, *template_markers: str) -> ToolFamily:
    """Make the family of a format of JSON calls, which chat templates with all these markers use; without any, it is
    used only by name."""
    return ToolFamily(
        call_format.markers,
        lambda schemas, writer: JsonToolParser(call_format, schemas.names, writer),
        call_format.write_calls,
        template_markers,
    )


def _special_token(call_format: SpecialTokenFormat, *template_markers: str) -> ToolFamily:
    """Make the family of a format of calls between special tokens, which chat templates with all these markers use."""
    return ToolFamily(
        call_format.markers,
        lambda _, writer: SpecialTokenToolParser(call_format, writer),
        call_format.write_calls,
        template_markers,
    )


def _xml(call_format: XmlCallFormat, *template_markers: str) -> ToolFamily:
    """Make the family of a format of calls with tagged parameters, which chat templates with all these markers use."""
    return ToolFamily(
        call_format.markers,
        lambda schemas, writer: XmlToolParser(call_format, schemas, writer),
        call_format.write_calls,
        template_markers,
    )


_PYTHON_TAG = "<|python_tag|>"
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)
_HERMES = JsonCallFormat(frozenset({"<tool_call>"}), frozenset({"</tool_call>"}))
_LLAMA = JsonCallFormat(frozenset({_PYTHON_TAG}), bare=True)
_QWEN_CODER = XmlCallFormat(
    "<tool_call>", "</tool_call>", "<function=", ">", "</function>", "<parameter=", ">", "", "</parameter>", lines=True
)
_MINIMAX = XmlCallFormat(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    '<invoke name="',
    '">',
    "</invoke>",
    '<parameter name="',
    '">',
    "",
    "</parameter>",
    section=True,
)
_GLM = XmlCallFormat(
    "<tool_call>", "</tool_call>", "", "\n", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
)
_KIMI = SpecialTokenFormat(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    re.compile(r"(?:functions\.)?(?P<name>[^\s:]+)(?::\d+)?"),
    header=("functions.", ":", r"/[0-9]{1,3}/"),
)
_NAME = re.compile(r"(?P<name>\S+)")

# The order matters: detection takes the first family whose template markers all occur in the template.
TOOL_FAMILIES: dict[str, ToolFamily] = {
    "deepseek_v3": _special_token(SpecialTokenFormat(*_DEEPSEEK, _NAME, fenced=True), _DEEPSEEK[2], "```json"),
    "deepseek_v31": _special_token(SpecialTokenFormat(*_DEEPSEEK, _NAME), _DEEPSEEK[2]),
    "kimi_k2": _special_token(_KIMI, "<|tool_calls_section_begin|>"),
    "minimax_m2": _xml(_MINIMAX, "<minimax:tool_call>"),
    "qwen3_coder": _xml(_QWEN_CODER, "<function=", "<parameter="),
    "glm45": _xml(_GLM, "<arg_key>"),
    "granite": _json(
        JsonCallFormat(frozenset({"<|tool_call|>", "<tool_call>"}), frozenset({"</tool_call>"})), "<|tool_call|>"
    ),
    "hermes": _json(_HERMES, "<tool_call>"),
    "mistral": _json(JsonCallFormat(frozenset({"[TOOL_CALLS]"}), named=True), "[TOOL_CALLS]"),
    "phi4_mini_json": _json(JsonCallFormat(frozenset({"functools"})), "<|tool|>"),
    "pythonic": ToolFamily(
        frozenset({_PYTHON_TAG}),
        lambda _, writer: PythonicToolParser(writer),
        pythonic_grammar.write_calls,
        ("[func_name1(",),
    ),
    "llama3_json": _json(_LLAMA, _PYTHON_TAG),
}
TOOL_FAMILIES["qwen3_xml"] = TOOL_FAMILIES["qwen3_coder"]
TOOL_FAMILIES["llama4_json"] = TOOL_FAMILIES["llama3_json"]
TOOL_FAMILIES["llama4_pythonic"] = TOOL_FAMILIES["pythonic"]

_THINK = ReasoningMarkers("<think>", "</think>")
REASONING_FAMILIES: dict[str, ReasoningFamily] = {
    "deepseek_r1": ReasoningFamily(_THINK, assumed=True),
    "deepseek_v3": ReasoningFamily(_THINK),
    "qwen3": ReasoningFamily(_THINK),
    "glm45": ReasoningFamily(_THINK),
    "kimi_k2": ReasoningFamily(ReasoningMarkers("<think>", "</think>", frozenset({"<|tool_calls_section_begin|>"}))),
    "minimax_m2": ReasoningFamily(_THINK, assumed=True),
    "mistral": ReasoningFamily(ReasoningMarkers("[THINK]", "[/THINK]")),
    "seed_oss": ReasoningFamily(ReasoningMarkers("<seed:think>", "</seed:think>"), assumed=True),
    "granite": ReasoningFamily(ReasoningMarkers("Here is my thought process:", "Here is my response:")),
}


def detect_tool_family(template: str) -> str:
    """Return HARMONY for a chat template of Harmony, which is not in TOOL_FAMILIES. For other templates, return the
    name of the first family in TOOL_FAMILIES whose template markers all occur in the template; "" if there is none."""
    if _is_harmony(template):
        return HARMONY
    found = (
        n
        for n, family in TOOL_FAMILIES.items()
        if family.template_markers and all(s in template for s in family.template_markers)
    )
    return next(found, "")


def detect_reasoning_family(template: str, added: Collection[str]) -> str:
    """Return the name of the family whose start and end markers the chat template or the vocabulary has; "" if there is
    none. Harmony, which only the chat template can show, comes first, then qwen3, mistral, seed_oss and granite; other
    families are used only by name."""
    if _is_harmony(template):
        return HARMONY_REASONING
    for name in ("qwen3", "mistral", "seed_oss", "granite"):
        markers = REASONING_FAMILIES[name].markers
        if all(marker in template or marker in added for marker in (markers.start, markers.end)):
            return name
    return ""


def _is_harmony(template: str) -> bool:
    return CHANNEL in template and MESSAGE in template
