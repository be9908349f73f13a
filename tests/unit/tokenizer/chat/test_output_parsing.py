"""Parsers of what models write: each family's text is taken apart, whatever the pieces in which it comes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_common.errors import ConfigError
from quire_common.finish import PartKind
from quire_tokenizer.output_parsing import harmony
from quire_tokenizer.output_parsing.answer_parsers import AnswerParsers, ParseOptions, PromptEnd
from quire_tokenizer.output_parsing.families import HARMONY, REASONING_FAMILIES, TOOL_FAMILIES, detect_tool_family
from quire_tokenizer.output_parsing.parts import MAX_NAME_CHARS, Part
from tests.tiers import examples
from tests.unit.tokenizer.answer_texts import WRITERS, Call, Render

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "metric": {"type": "boolean"},
        "share": {"type": ["number", "null"]},
        "tags": {"type": "array"},
        "where": {"anyOf": [{"type": "object"}, {"type": "null"}]},
    },
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("get_weather", "find")]
CASES = [
    pytest.param(name, *writer, id=f"{name}-{writer[0].__name__}") for name, each in WRITERS.items() for writer in each
]
OPTIONS = ParseOptions(TOOLS, calls=True)

_texts = st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=12)
_plain_texts = st.text("abc é.{}\"'\\<>/[]", max_size=12).map(str.strip)
_arguments = st.fixed_dictionaries(
    {},
    optional={
        "city": _texts,
        "days": st.integers(-(10**6), 10**6),
        "metric": st.booleans(),
        "share": st.none() | st.floats(-1e6, 1e6, allow_nan=False),
        "tags": st.lists(_texts | st.integers(0, 9), max_size=3),
        "where": st.none() | st.dictionaries(_texts, st.lists(st.integers(0, 9), max_size=2), max_size=2),
    },
)
_calls = st.lists(st.tuples(st.sampled_from(["get_weather", "find"]), _arguments), min_size=1, max_size=3)


class Pieces:
    """A decoder whose tokens are pieces of a text."""

    def __init__(self, pieces: Iterable[str]) -> None:
        self.pieces = list(pieces)

    def feed(self, token_id: int) -> str:
        return self.pieces[token_id]

    def flush(self) -> str:
        return ""


def parse(
    parsers: AnswerParsers, pieces: Iterable[str], options: ParseOptions = OPTIONS
) -> list[tuple[PartKind, int, str]]:
    """Return the parts of an answer that comes in these pieces."""
    inner = Pieces(pieces)
    decoder = parsers.wrap(inner, options)
    text = "".join([decoder.feed(at) for at in range(len(inner.pieces))] + [decoder.flush()])
    found: list[tuple[PartKind, int, str]] = []
    at = 0
    for kind, call, chars in merged(decoder.take_parts(len(text))):
        found.append((PartKind(kind), call, text[at : at + chars]))
        at += chars
    return found


def merged(parts: list[Part]) -> list[Part]:
    """Join neighbours of the same kind."""
    joined: list[Part] = []
    for part in parts:
        if joined and joined[-1][:2] == part[:2]:
            joined[-1] = part._replace(chars=part.chars + joined[-1].chars)
        else:
            joined.append(part)
    return joined


def expected(text: str, calls: Iterable[Call]) -> tuple[str, list[tuple[str, Any]]]:
    return text, [(name, arguments) for name, arguments in calls]


def summary(parts: list[tuple[PartKind, int, str]]) -> tuple[str, list[tuple[str, Any]]]:
    """Return the content, and each call's name and parsed arguments. Calls are numbered in order."""
    content = "".join(text for kind, _, text in parts if kind is PartKind.CONTENT)
    names = [text for kind, _, text in parts if kind is PartKind.TOOL_NAME]
    arguments = [
        "".join(t for k, call, t in parts if k is PartKind.TOOL_ARGUMENTS and call == at) for at in range(len(names))
    ]
    assert [call for kind, call, _ in parts if kind is PartKind.TOOL_NAME] == list(range(len(names)))
    return content, [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]


def tool_parsers(name: str, added: dict[str, int] | None = None) -> AnswerParsers:
    return AnswerParsers(added or {}, name, "")


@pytest.mark.parametrize(("name", "render", "has_text"), CASES)
@examples(40)
@given(text=_plain_texts, calls=_calls, data=st.data())
def test_calls_come_back_whatever_the_pieces(
    name: str, render: Render, has_text: bool, text: str, calls: list[Call], data: st.DataObject
) -> None:
    if name in ("qwen3_coder", "minimax_m2", "glm45"):
        calls = [(n, {k: _as_xml(v) for k, v in a.items()}) for n, a in calls]
    written = render(text if has_text else "", calls)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(written)), max_size=6)))
    pieces = [written[a:b] for a, b in zip([0, *cuts], [*cuts, len(written)], strict=True) if a < b]
    parsers = tool_parsers(name)
    parts = parse(parsers, pieces)
    assert summary(parts) == expected(text if has_text else "", calls)
    assert parse(parsers, written) == parts
    assert parse(parsers, [written]) == parts


@pytest.mark.parametrize("text", ['{"', '{"na', '{"name": "', '{"name": "get_', '{"type": "f', '{"id": "a'])
def test_an_object_that_is_cut_off_by_a_marker_is_content(text: str) -> None:
    written = text + '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Rome"}}'
    for pieces in (written, [written]):
        assert summary(parse(tool_parsers("llama3_json"), pieces)) == (text, [("get_weather", {"city": "Rome"})])


def test_a_marker_in_arguments_before_the_name_is_text() -> None:
    written = '{"parameters": {"city": "<|python_tag|>"}, "name": "get_weather"}'
    assert summary(parse(tool_parsers("llama3_json"), written)) == ("", [("get_weather", {"city": "<|python_tag|>"})])


@pytest.mark.parametrize("key", ["id", "type"])
@pytest.mark.parametrize("value", ["<|python_tag|>", 'a<|python_tag|>{\\"b<|python_tag|>'])
def test_a_marker_in_another_string_of_a_call_is_text(key: str, value: str) -> None:
    written = f'{{"{key}": "{value}", "name": "find", "parameters": {{"city": "<|python_tag|>"}}}}; '
    parsers = tool_parsers("llama3_json")
    second = '{"name": "get_weather", "parameters": {}}'
    for pieces in (written + second, [written + second]):
        calls = [("find", {"city": "<|python_tag|>"}), ("get_weather", {})]
        assert summary(parse(parsers, pieces)) == ("", calls)


@pytest.mark.parametrize("value", ['"a<|python_tag|>b", "age": 3}', '"a<|python_tag|>b', '"<|python_tag|>"}'])
def test_an_object_with_a_marker_that_is_no_call_is_content(value: str) -> None:
    written = '{"id": ' + value
    for pieces in (written, [written]):
        assert summary(parse(tool_parsers("llama3_json"), pieces)) == (written, [])


def test_text_after_a_stray_marker_between_calls_is_content() -> None:
    written = "[TOOL_CALLS]find{}[ARGS]["
    for pieces in (written, [written], [written[:-1], "["]):
        assert summary(parse(tool_parsers("mistral"), pieces)) == ("[ARGS][", [("find", {})])


@pytest.mark.parametrize(
    ("name", "call", "behind", "content"),
    [
        ("mistral", '[TOOL_CALLS][{"name": "find", "arguments": {}}', "] Bye", "Bye"),
        ("mistral", '[TOOL_CALLS][{"name": "find", "arguments": {}}', "\n]\n[1] says so", "[1] says so"),
        ("mistral", '[TOOL_CALLS][{"name": "find", "arguments": {}}', "] {x}", "{x}"),
        ("phi4_mini_json", 'functools[{"name": "find", "arguments": {}}', " ]Bye", "Bye"),
        ("llama3_json", '{"name": "find", "parameters": {}}', " [1] says so", "[1] says so"),
    ],
)
def test_the_bracket_that_ends_a_list_of_calls_is_not_content(name: str, call: str, behind: str, content: str) -> None:
    for pieces in ([call, *behind], [call + behind], [call, behind], call + behind):
        assert summary(parse(tool_parsers(name), pieces)) == (content, [("find", {})])


def _as_xml(value: object) -> object:
    """Values that these families can write: strings without their tags, and without a line break at either end."""
    if isinstance(value, str):
        return "".join(c for c in value if c not in "<>\n")
    return value


@pytest.mark.parametrize("name", sorted(WRITERS))
@examples(40)
@given(text=st.text(st.characters(codec="utf-8"), max_size=40))
def test_text_without_markers_is_content(name: str, text: str) -> None:
    content, calls = summary(parse(tool_parsers(name), text))
    assert not calls
    assert content == text


@pytest.mark.parametrize("name", sorted(WRITERS))
@examples(40)
@given(data=st.data())
def test_junk_never_raises_and_does_not_depend_on_pieces(name: str, data: st.DataObject) -> None:
    markers = sorted(harmony.MARKERS if name == HARMONY else TOOL_FAMILIES[name].markers)
    junk = st.sampled_from(
        [
            *markers,
            "{",
            "}",
            '"',
            "\\",
            ":",
            "[",
            "]",
            "name",
            '{"name": "find"',
            "arguments",
            "\n",
            "a",
            ">",
            "(",
            ")",
            "```",
        ]
    )
    written = "".join(data.draw(st.lists(junk, max_size=25)))
    parsers = tool_parsers(name)
    whole = parse(parsers, [written] if written else [])
    assert parse(parsers, written) == whole
    tokens = {marker: at for at, marker in enumerate(markers)}
    assert "".join(text for _, _, text in parse(tool_parsers(name, tokens), written)) is not None


@pytest.mark.parametrize(("name", "render", "_text"), CASES)
def test_a_call_with_a_long_name_does_not_depend_on_pieces(name: str, render: Render, _text: bool) -> None:
    parsers = tool_parsers(name)
    for chars in (990, *range(MAX_NAME_CHARS - 40, MAX_NAME_CHARS + 4)):
        written = render("", [("f" * chars, {"city": "Rome"})])
        whole = parse(parsers, [written])
        assert parse(parsers, written) == parse(parsers, [written[:700], written[700:]]) == whole, chars


@pytest.mark.parametrize("behind", ["{}", "[ARGS]{}", " {} Bye", "[CALL_ID]", ""])
def test_a_name_longer_than_names_may_be_is_content_whatever_the_pieces(behind: str) -> None:
    parsers, written = tool_parsers("mistral"), f"[TOOL_CALLS]{'f' * 2000}{behind}"
    for pieces in ([written], [written[:1500], written[1500:]], written):
        assert summary(parse(parsers, pieces)) == (written, [])


@pytest.mark.parametrize(
    "behind",
    [
        "```python\n{}\n```",
        "```json {}\n```",
        "``` json\n{}",
        "``\n{}",
        "`x`{}",
        "prose {}",
        "```" + " " * 2000 + "\n{}",
    ],
)
def test_a_fenced_call_without_its_fence_is_content_at_once_whatever_the_pieces(behind: str) -> None:
    parsers, tail = tool_parsers("deepseek_v3"), "x" * 50
    written = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n \n{behind}{tail}"
    for at in range(len(written) + 1):
        assert summary(parse(parsers, [written[:at], written[at:]])) == (written, []), at
    assert summary(parse(parsers, written)) == (written, [])
    decoder = parsers.wrap(Pieces(written), OPTIONS)
    assert [decoder.feed(at) for at in range(len(written))][-len(tail) :] == list(tail)
    assert decoder.failures == ["no_call"]


@pytest.mark.parametrize("space", [" \n", "\n\n", "\t", "\n" * 5000])
def test_white_space_before_a_name_does_not_depend_on_pieces(space: str) -> None:
    for name, marker in (("glm45", "<tool_call>"), ("qwen3_coder", "<tool_call>"), ("minimax_m2", "<invoke name=")):
        parsers = tool_parsers(name)
        written = f"{marker}{space}foo"
        assert parse(parsers, written) == parse(parsers, [written])
        assert parse(parsers, written) == [(PartKind.CONTENT, -1, written)]


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("hermes", 'See <tool_call>\n{"nome": 1}\n</tool_call> there'),
        ("hermes", "<tool_call>no JSON</tool_call>"),
        ("mistral", "[TOOL_CALLS]]}{"),
        ("hermes", '<tool_call>\n{"name": "find", "argu'[:20]),
        ("llama3_json", '{"name": "Ann", "parameters": {"age": 3}}'),
        ("llama3_json", '{"age": 3, "name": "find"}'),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[find(1)]"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>a b<｜tool▁sep｜>"),
        ("mistral", "[TOOL_CALLS][ARGS]{}"),
        ("glm45", "<tool_call></tool_call>"),
        ("glm45", "See <tool_call>\n</tool_call> there"),
        ("qwen3_coder", "<tool_call>\n</tool_call>"),
    ],
)
def test_what_is_no_call_stays_content(name: str, written: str) -> None:
    content, calls = summary(parse(tool_parsers(name), written))
    assert not calls
    assert content == written


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("hermes", '<tool_call>{"name": "find\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "find", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>'),
        ("pythonic", '[find(city="\\ud800")]'),
    ],
)
def test_escapes_of_half_a_character_make_text_that_can_be_sent(name: str, written: str) -> None:
    parts = parse(tool_parsers(name), written)
    assert [kind for kind, _, _ in parts] == [PartKind.TOOL_NAME, PartKind.TOOL_ARGUMENTS]
    for _, _, text in parts:
        text.encode()
    json.loads(parts[1][2])


def test_a_marker_in_an_argument_is_text() -> None:
    call = ("find", {"city": 'a </tool_call> "b" <tool_call>'})
    parts = parse(tool_parsers("hermes"), WRITERS["hermes"][0][0]("", [call]))
    assert summary(parts) == ("", [call])


def test_arguments_are_slices_of_what_the_model_wrote() -> None:
    arguments = '{ "city":"Par\\u0069s",\n "days" : 1.50e1 }'
    parts = parse(tool_parsers("hermes"), f'<tool_call>{{"name": "find", "arguments": {arguments} }}</tool_call>')
    assert parts == [(PartKind.TOOL_NAME, 0, "find"), (PartKind.TOOL_ARGUMENTS, 0, arguments)]


def test_arguments_before_the_name_or_in_a_string_are_understood() -> None:
    before = '<tool_call>{"arguments": {"days": 1}, "name": "find"}</tool_call>'
    quoted = '<tool_call>{"name": "find", "arguments": "{\\"days\\": 1}"}</tool_call>'
    none = '<tool_call>{"name": "find"}</tool_call>'
    results = [summary(parse(tool_parsers("hermes"), written))[1] for written in (before, quoted, none)]
    assert results == [[("find", {"days": 1})], [("find", {"days": 1})], [("find", {})]]


def test_a_marker_that_is_a_token_is_no_marker_when_the_model_spells_it() -> None:
    parsers = tool_parsers("hermes", {"<tool_call>": 3, "</tool_call>": 4})
    written = 'Write <tool_call>{"name": "find", "arguments": {}}</tool_call>'
    assert summary(parse(parsers, ["", "", "", *written])) != (written, [])  # ids 3 and 4 are markers
    spelled = parse(tool_parsers("hermes", {"<tool_call>": 900, "</tool_call>": 901}), written)
    assert summary(spelled) == (written, [])


@pytest.mark.parametrize("name", sorted(REASONING_FAMILIES))
@pytest.mark.parametrize("prompt_end", ["unknown", "thinking", "answering"])
def test_reasoning_is_split_from_content(name: str, prompt_end: PromptEnd) -> None:
    family = REASONING_FAMILIES[name]
    parsers = AnswerParsers({}, "", name)
    options = ParseOptions(reasoning=True, prompt_end=prompt_end)
    start, end = family.markers.start, family.markers.end
    thought = [(PartKind.REASONING, -1, "I see."), (PartKind.CONTENT, -1, "Yes.\n")]
    assert parse(parsers, f"{start}\nI see.\n{end}\n\nYes.\n", options) == thought
    thinking = prompt_end == "thinking" or (prompt_end == "unknown" and family.assumed)
    behind = parse(parsers, f"\nI see.\n{end}\n\nYes.\n", options)
    assert behind == thought if thinking else all(kind is PartKind.CONTENT for kind, _, _ in behind)
    plain = parse(parsers, "Yes. " + start + "x", options)
    assert plain == [(PartKind.REASONING if thinking else PartKind.CONTENT, -1, "Yes. " + start + "x")]


def test_a_thinking_model_calls_tools_behind_its_thoughts() -> None:
    parsers = AnswerParsers({}, "hermes", "qwen3")
    written = '<think>\nA <tool_call>?\n</think>\n\nWait.\n<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'
    assert parse(parsers, written, ParseOptions(TOOLS, calls=True, reasoning=True)) == [
        (PartKind.REASONING, -1, "A <tool_call>?"),
        (PartKind.CONTENT, -1, "Wait."),
        (PartKind.TOOL_NAME, 0, "find"),
        (PartKind.TOOL_ARGUMENTS, 0, "{}"),
    ]


def test_harmony_has_reasoning_text_and_calls_in_channels() -> None:
    parsers = AnswerParsers({}, "openai", "openai_gptoss")
    written = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"days": 2}<|call|>'
    )
    assert parse(parsers, written, ParseOptions(TOOLS, calls=True, reasoning=True)) == [
        (PartKind.REASONING, -1, "Hm."),
        (PartKind.CONTENT, -1, "I look."),
        (PartKind.TOOL_NAME, 0, "find"),
        (PartKind.TOOL_ARGUMENTS, 0, '{"days": 2}'),
    ]


@pytest.mark.parametrize(
    ("written", "content"),
    [
        ("Hello<|end|>", "Hello"),
        ("Hello<|return|>", "Hello"),
        ("Hello<|start|>assistant<|channel|>final", "Hello"),
        ("Hello<|end|><|start|>assistant<|channel|>final<|message|>, you", "Hello, you"),
        ("Hello", "Hello"),
        ("<|channel|>analysis", ""),
        ("<|channel|>analysis<|end|>", ""),
        ("<|channel|>final<|message|>Hello<|end|> you<|end|>", "Hello"),
        ("<|start|>assistant", ""),
        (" to=functions.find<|channel|>commentary <|constrain|>json", ""),
    ],
)
def test_text_without_a_header_is_content_in_harmony_and_a_header_is_not(written: str, content: str) -> None:
    for pieces in (written, [written]):
        assert summary(parse(tool_parsers("openai"), pieces)) == (content, [])


@pytest.mark.parametrize(
    ("tool_parser", "reasoning_parser", "calls", "reasoning"),
    [
        ("openai", "", True, True),
        ("", "openai_gptoss", False, True),
        ("openai", "openai_gptoss", True, True),
        ("hermes", "", True, False),
        ("", "qwen3", False, True),
    ],
)
def test_an_answer_is_parsed_for_what_the_chosen_parsers_find(
    tool_parser: str, reasoning_parser: str, *, calls: bool, reasoning: bool
) -> None:
    parsers = AnswerParsers({}, tool_parser, reasoning_parser)
    assert parsers.wanted(ParseOptions(calls=True)) is calls
    assert parsers.wanted(ParseOptions(reasoning=True)) is reasoning
    assert not parsers.wanted(ParseOptions())


def test_values_without_quotes_get_the_types_of_the_schema() -> None:
    written = (
        "<tool_call>\n<function=find>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n12\n</parameter>\n"
        "<parameter=metric>\nTrue\n</parameter>\n<parameter=where>\nnot JSON\n</parameter>\n"
        "<parameter=unknown>\n[1]\n</parameter>\n</function>\n</tool_call>"
    )
    assert summary(parse(tool_parsers("qwen3_coder"), written))[1] == [
        ("find", {"city": "12", "days": 12, "metric": True, "where": "not JSON", "unknown": "[1]"})
    ]


def test_tokens_of_reasoning_are_counted_without_the_markers() -> None:
    decoder = AnswerParsers({}, "", "qwen3").wrap(
        Pieces(["<think>", "a", " b", "</think>", "c"]), ParseOptions(reasoning=True)
    )
    for at in range(5):
        decoder.feed(at)
    assert decoder.reasoning_tokens == 2


def test_an_unknown_parser_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--tool-call-parser 'nope' is not known"):
        AnswerParsers({}, "nope", "")
    with pytest.raises(ConfigError, match="--reasoning-parser 'nope' is not known"):
        AnswerParsers({}, "", "nope")


def test_a_family_is_detected_by_what_its_template_holds() -> None:
    assert detect_tool_family("{{ '<tool_call>' }} {{ tools }}") == "hermes"
    assert detect_tool_family("<tool_call>\n<function=x>\n<parameter=y>") == "qwen3_coder"
    assert detect_tool_family("<tool_call>{{ name }}\n<arg_key>") == "glm45"
    assert detect_tool_family("[TOOL_CALLS]") == "mistral"
    assert detect_tool_family("<tool_call> <|channel|>analysis<|message|>") == "openai"
    assert detect_tool_family("{{ messages }}") == ""


@pytest.mark.perf
@pytest.mark.parametrize("name", sorted(WRITERS))
def test_a_call_that_never_ends_takes_time_in_proportion_to_its_length(name: str) -> None:
    """Whatever is held back is bounded or searched once."""
    render = WRITERS[name][0][0]
    begin = render("", [("find", {"city": "x"})]).partition("find")[0]
    parsers = tool_parsers(name)

    def seconds(length: int) -> float:
        pieces = [begin, *["abcd"] * length]
        taken = []
        for _ in range(3):
            started = time.process_time()
            parse(parsers, pieces)
            taken.append(time.process_time() - started)
        return min(taken)

    assert seconds(40_000) < 12 * seconds(10_000)
