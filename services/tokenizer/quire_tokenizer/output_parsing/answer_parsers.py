"""Chooses a tokenizer's parsers, by name or by the model's chat template, and makes one parser for each answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from quire_common.errors import ConfigError
from quire_tokenizer.output_parsing import families, harmony
from quire_tokenizer.output_parsing.harmony import HarmonyParser
from quire_tokenizer.output_parsing.marker_finder import TextMarkers
from quire_tokenizer.output_parsing.parsed_decoder import ParsedDecoder
from quire_tokenizer.output_parsing.parts import OutputParser, PartWriter
from quire_tokenizer.output_parsing.reasoning import PlainContent, ReasoningParser
from quire_tokenizer.output_parsing.schemas import ToolSchemas

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from quire_tokenizer.detokenize.incremental_decoder import TextDecoder

NO_PARSER = "none"
TOOL_CALLS, REASONING = "tool_calls", "reasoning"
PromptEnd = Literal["unknown", "thinking", "answering"]


@dataclass(frozen=True, slots=True)
class ParseOptions:
    """The parts to find in one answer. `tools`: OpenAI's list, for names and types; `calls`, `reasoning`: whether the
    parser looks for them. `prompt_end`: whether the chat template ends within reasoning or after it."""

    tools: object = None
    calls: bool = False
    reasoning: bool = False
    prompt_end: PromptEnd = "unknown"


@dataclass(frozen=True, slots=True)
class _Markers:
    tokens: Mapping[int, str]
    in_text: TextMarkers

    @classmethod
    def of(cls, markers: frozenset[str], added: Mapping[str, int]) -> _Markers:
        """Divide the markers: those that are added tokens, by their id in `added`, and the others, which are searched
        in the text."""
        return cls(
            {added[marker]: marker for marker in markers if marker in added}, TextMarkers(markers - added.keys())
        )


class AnswerParsers:
    """The parsers of one model. Immutable. `added`: ids of the tokens that were added to the vocabulary, by their
    text."""

    def __init__(self, added: Mapping[str, int], tool_parser: str, reasoning_parser: str) -> None:
        """Raises ConfigError for an unknown name."""
        self.tool_parser, self.reasoning_parser = tool_parser, reasoning_parser
        tool_names = families.TOOL_FAMILIES.keys() | {families.HARMONY}
        reasoning_names = families.REASONING_FAMILIES.keys() | {families.HARMONY_REASONING}
        self._tools = (
            families.TOOL_FAMILIES.get(_known(tool_parser, tool_names, "tool_call_parser")) if tool_parser else None
        )
        self._reasoning = (
            families.REASONING_FAMILIES.get(_known(reasoning_parser, reasoning_names, "reasoning_parser"))
            if reasoning_parser
            else None
        )
        # One parser reads Harmony's messages, whether the tool parser or the reasoning parser is Harmony's.
        self._harmony = reasoning_parser == families.HARMONY_REASONING or tool_parser == families.HARMONY
        self._markers = {
            (calls, reasoning): _Markers.of(self._markers_of(calls=calls, reasoning=reasoning), added)
            for calls in (False, True)
            for reasoning in (False, True)
        }

        self._names = {
            (calls, reasoning): tuple(
                (kind, name)
                for kind, name, wanted in ((TOOL_CALLS, tool_parser, calls), (REASONING, reasoning_parser, reasoning))
                if name and wanted
            )
            for calls, reasoning in self._markers
        }

    def wanted(self, options: ParseOptions) -> bool:
        """Whether an answer with these options needs a parser: it wants calls and the model has a tool parser, or it
        wants reasoning and the model has a reasoning parser or Harmony's tool parser."""
        return (options.calls and bool(self.tool_parser)) or (
            options.reasoning and (bool(self.reasoning_parser) or self._harmony)
        )

    def token_markers(self, options: ParseOptions) -> Mapping[int, str]:
        """Return the markers that are tokens of the vocabulary, by id. The decoder of an answer with these options must
        not skip them."""
        return self._markers[options.calls, options.reasoning].tokens

    def wrap(self, decoder: TextDecoder, options: ParseOptions) -> ParsedDecoder:
        """Return a decoder that parses one answer with these options, around `decoder`. The latter must not skip the
        tokens of `token_markers`."""
        writer, wanted = PartWriter(), (options.calls, options.reasoning)
        markers, names = self._markers[wanted], self._names[wanted]
        return ParsedDecoder(decoder, self._parser(options, writer), writer, markers.tokens, markers.in_text, names)

    def prompt_end(self, prompt: str) -> PromptEnd:
        """Return "thinking" if a prompt ends with the start marker of reasoning, "answering" if it ends with the end
        marker, else "unknown". Without a reasoning parser, and for that of Harmony, the result is always "unknown".
        Only markers at the very end count (but for white space). The chat template writes this end, or the user if the
        prompt ends with a message's text, as with `continue_final_message`."""
        if self._reasoning is None:
            return "unknown"
        tail = prompt[-256:].rstrip()
        if tail.endswith(self._reasoning.markers.start):
            return "thinking"
        return "answering" if tail.endswith(self._reasoning.markers.end) else "unknown"

    def _markers_of(self, *, calls: bool, reasoning: bool) -> frozenset[str]:
        """Return the markers to look for if calls, reasoning or both are wanted. If either parser is Harmony's,
        they are always all of its markers."""
        if self._harmony:
            return harmony.MARKERS
        markers = self._tools.markers if calls and self._tools else frozenset[str]()
        return markers | (self._reasoning.markers.all if reasoning and self._reasoning else frozenset[str]())

    def _parser(self, options: ParseOptions, writer: PartWriter) -> OutputParser:
        """Make the parser of one answer. If the model's tool or reasoning parser is Harmony's, Harmony's parser alone
        is returned, whatever is wanted. Else it is the tool parser if calls are wanted and the model has one, or a
        parser of plain content. If reasoning is wanted and the model has a reasoning parser, that one is put around it.
        The reasoning parser starts within reasoning if the prompt ends so, or if this is unknown and the family assumes
        it."""
        if self._harmony:
            return HarmonyParser(writer, calls=options.calls)
        parser: OutputParser = PlainContent(writer)
        if options.calls and self._tools is not None:
            parser = self._tools.make(ToolSchemas(options.tools), writer)
        if options.reasoning and self._reasoning is not None:
            thinking = options.prompt_end == "thinking" or (options.prompt_end == "unknown" and self._reasoning.assumed)
            parser = ReasoningParser(self._reasoning.markers, parser, writer, thinking=thinking)
        return parser


def choose_parsers(added: Mapping[str, int], template: str, tool_parser: str, reasoning_parser: str) -> AnswerParsers:
    """Make the parsers with these names. "none" means no parser. "" means the parser that the chat template indicates;
    for reasoning, the markers may also be in the vocabulary alone (`added`). Raises ConfigError for an unknown
    name."""
    tools = tool_parser or families.detect_tool_family(template)
    reasoning = reasoning_parser or families.detect_reasoning_family(template, added)
    return AnswerParsers(added, *("" if name == NO_PARSER else name for name in (tools, reasoning)))


def _known(name: str, names: Collection[str], option: str) -> str:
    """Return the name. Raises ConfigError, which names `option`, if there is no such parser."""
    if name in names:
        return name
    flag = option.replace("_", "-")
    raise ConfigError(
        "UNKNOWN_PARSER",
        f"--{flag} {name[:50]!r} is not known.",
        f"Use one of {', '.join(sorted(names))}; or none.",
        param=option,
    )
