"""Answers whose calls are not whole are counted by parser and reason, when they end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from quire_common.telemetry.metrics import registry
from quire_tokenizer import statistics
from quire_tokenizer.detokenize.detokenizer import Detokenizer, OpenRequest, StepText, TokenRows
from quire_tokenizer.model_folder import read_model_folder
from quire_tokenizer.vocabulary import Vocabulary
from tests.unit.tokenizer import folders
from tests.unit.tokenizer.answer_texts import WRITERS, Render
from tests.unit.tokenizer.chat.test_output_parsing import CASES, OPTIONS, Pieces, tool_parsers
from tests.unit.tokenizer.chat.test_parsed_resume import LIMITS
from tests.unit.tokenizer.chat.test_parsed_resume import OPTIONS as HERMES


def failures(name: str, pieces: Sequence[str]) -> list[str]:
    """Return the faults of the calls of an answer that comes in these pieces; a text comes character by character."""
    decoder = tool_parsers(name).wrap(Pieces(pieces), OPTIONS)
    for at in range(len(pieces)):
        decoder.feed(at)
    decoder.flush()
    return decoder.failures


@pytest.mark.parametrize(("name", "render", "has_text"), CASES)
def test_whole_calls_and_plain_text_are_no_failures(name: str, render: Render, has_text: bool) -> None:
    calls = [("find", {"city": "a", "days": 1}), ("get_weather", {})]
    assert failures(name, render("Well " if has_text else "", calls)) == []
    assert failures(name, render("Well, {x} [1]", [])) == []


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_an_answer_that_ends_within_a_call_is_one_failure(name: str) -> None:
    written = WRITERS[name][0][0]("", [("get_weather", {}), ("find", {"city": "Bonn"})])
    end = written.rindex("Bonn") + 2
    assert failures(name, written[:end]) == ["no_call" if name == "pythonic" else "unfinished"]


@pytest.mark.parametrize(
    ("name", "written", "expected"),
    [
        ("hermes", '<tool_call>\n{"name": "find", "arguments": {"a": x}}\n</tool_call>', ["bad_arguments"]),
        ("hermes", "<tool_call>no JSON</tool_call>", ["no_call"]),
        ("hermes", '<tool_call>{"name": "find", "arguments": {}}</tool_call> <tool_call>{"nome": 1}</tool_call>',
         ["no_call"]),
        ("hermes", 'Like <b>{"name": "find"}</b>', []),
        ("mistral", "[TOOL_CALLS]]}{", ["no_call"]),
        ("llama3_json", '{"name": "Ann", "parameters": {"age": 3}}', []),
        ("llama3_json", '<|python_tag|>{"age": 3}', ["no_call"]),
        ("pythonic", "[find(1)]", ["no_call"]),
        ("pythonic", "[1, 2, 3]", []),
        ("deepseek_v31", "<｜tool▁call▁begin｜>a b<｜tool▁sep｜>{}", ["no_call"]),
        ("kimi_k2", "<|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{'a': 1}<|tool_call_end|>",
         ["bad_arguments"]),
        ("qwen3_coder", "<tool_call>\nhow?\n</tool_call>", ["no_call"]),
        ("openai", "<|channel|>commentary to=functions.find <|constrain|>json<|call|>", ["no_call"]),
    ],
)  # fmt: skip
def test_each_broken_call_has_its_reason(name: str, written: str, expected: list[str]) -> None:
    assert failures(name, written) == expected


@pytest.mark.parametrize("behind", ["\nfoo", "\n", "\n</function>"])
def test_white_space_behind_a_call_is_no_failure_whatever_the_pieces(behind: str) -> None:
    call = "<tool_call>\n<function=find>\n</function>"
    for pieces in (call + behind, [call + behind], [call, behind], [call, "\n", behind[1:]]):
        assert failures("qwen3_coder", pieces) == []


def test_ended_answers_and_their_failures_are_counted_by_parser(tmp_path: Path) -> None:
    folder = folders.write_folder(tmp_path / "tiny")
    vocabulary = Vocabulary(read_model_folder(str(folder)), tool_parser="hermes")

    def counted(name: str, **labels: str) -> float:
        return registry.get_sample_value(f"quire_tokenizer_{name}_total", labels) or 0.0

    def counts() -> list[float]:
        return [
            counted("parsed_answers", kind="tool_calls", parser="hermes"),
            counted("parsed_answers", kind="reasoning", parser="qwen3"),
            counted("parse_failures", parser="hermes", reason="unfinished"),
        ]

    before = counts()
    for written, finish in (("Well.", 1), ('<tool_call>{"name": "find", "arguments": {"a', 2), ("Well.", 0)):
        detokenizer, handle = Detokenizer(vocabulary, LIMITS, statistics.ended), np.array([1], np.int32)
        for _ in detokenizer.open(OpenRequest(1, parsing=HERMES)):
            pass
        ids = np.array(vocabulary.tokenizer.encode(written, add_special_tokens=False).ids, np.int32)
        rows = TokenRows(handle, np.array([len(ids)], np.int32), ids, np.array([finish], np.uint8))
        detokenizer.step(rows, StepText())
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [2, 2, 1]
