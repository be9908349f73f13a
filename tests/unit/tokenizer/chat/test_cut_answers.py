"""Answers that end within a marker that is ordinary text: a client sees nothing of a marker that a parser expects."""

from __future__ import annotations

import pytest

from quire_common.finish import PartKind
from quire_tokenizer.output_parsing.answer_parsers import AnswerParsers, ParseOptions
from tests.unit.tokenizer.chat.test_output_parsing import TOOLS, parse, summary, tool_parsers
from tests.unit.tokenizer.chat.test_parse_failures import failures

FIND = '{"name": "find", "arguments": {}}'


@pytest.mark.parametrize(
    ("name", "call", "behind"),
    [
        ("hermes", f"<tool_call>\n{FIND}", "\n</tool_call>\n<tool_call>"),
        ("granite", f"<|tool_call|>[{FIND}", "]<|tool_call|>"),
        ("mistral", f"[TOOL_CALLS][{FIND}", "]\n[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS]find{}", "[TOOL_CALLS]"),
        ("phi4_mini_json", f"functools[{FIND}", "] functools"),
        ("llama3_json", '{"name": "find", "parameters": {}}', "; <|python_tag|>"),
        ("qwen3_coder", "<tool_call>\n<function=find>\n</function>", "\n</tool_call>\n<tool_call>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="find"></invoke>', "\n</minimax:tool_call>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="find"></invoke>', '\n<invoke name="'),
        ("glm45", "<tool_call>find\n</tool_call>", "\n<tool_call>"),
        (
            "deepseek_v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{}\n```",
            "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>",
        ),
        (
            "deepseek_v31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{}",
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>\n<｜tool▁calls▁begin｜>",
        ),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{}",
            "<|tool_call_end|><|tool_calls_section_end|>",
        ),
        ("openai", "<|channel|>commentary to=functions.find<|message|>{}", "<|call|><|start|>assistant<|channel|>"),
    ],
)
def test_a_marker_that_is_cut_off_behind_a_call_is_dropped(name: str, call: str, behind: str) -> None:
    for end in range(len(behind)):
        written = call + behind[:end]
        for pieces in (written, [written], [call, behind[:end]]):
            assert summary(parse(tool_parsers(name), pieces)) == ("", [("find", {})]), written
            assert failures(name, pieces) == [], written


@pytest.mark.parametrize(
    ("name", "before", "text"),
    [
        ("hermes", "", "So <tool_ca"),
        ("hermes", f"<tool_call>{FIND}</tool_call>\n", "So </tool_ca"),
        ("hermes", f"<tool_call>{FIND}</tool_call>\n", "<b"),
        ("mistral", f"[TOOL_CALLS][{FIND}]\n", "So [TOOL"),
        ("qwen3_coder", "<tool_call><function=find></function></tool_call>", "So <tool_ca"),
        ("kimi_k2", "", "<|tool_ca"),
        ("pythonic", "[find()]\n", "So <|python"),
        ("openai", "<|channel|>final<|message|>", "So <|en"),
        ("openai", "", "So <|en"),
    ],
)
def test_a_marker_that_is_cut_off_in_text_is_content(name: str, before: str, text: str) -> None:
    for pieces in (before + text, [before + text], [before, text]):
        assert summary(parse(tool_parsers(name), pieces))[0] == text


def test_a_marker_that_is_cut_off_in_a_string_of_a_call_is_an_argument() -> None:
    call, arguments = '<tool_call>{"name": "find", "arguments": ', '{"city": "a</tool'
    for pieces in (call + arguments, [call + arguments]):
        parts = parse(tool_parsers("hermes"), pieces)
        assert parts == [(PartKind.TOOL_NAME, 0, "find"), (PartKind.TOOL_ARGUMENTS, 0, arguments)]


def test_a_marker_that_is_cut_off_behind_arguments_does_not_spoil_them() -> None:
    written = '<tool_call>{"name": "find", "arguments": {}</tool_'
    assert summary(parse(tool_parsers("hermes"), written)) == ("", [("find", {})])


@pytest.mark.parametrize(
    ("written", "kind", "text"),
    [
        ("<think>Hm </thi", PartKind.REASONING, "Hm </thi"),
        ("<think>Hm</think>\n<tool_ca", PartKind.CONTENT, "<tool_ca"),
        (f"<tool_call>{FIND}</tool_call></thi", PartKind.CONTENT, "</thi"),
    ],
)
def test_a_marker_of_reasoning_that_is_cut_off_is_text(written: str, kind: PartKind, text: str) -> None:
    parsers, options = AnswerParsers({}, "hermes", "qwen3"), ParseOptions(TOOLS, calls=True, reasoning=True)
    for pieces in (written, [written]):
        assert parse(parsers, pieces, options)[-1] == (kind, -1, text)
