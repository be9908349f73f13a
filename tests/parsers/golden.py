"""Golden streams: answers that a model of each family could write, made from seeds, with what a client must get.

A stream has some 80 characters and 30 tokens, so that every pair of its token boundaries can be tried in minutes. Of
ten streams, six are well formed; one has junk between its parts; one is all junk; two are cut off at any character.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from quire_tokenizer.output_parsing import harmony
from quire_tokenizer.output_parsing.answer_parsers import ParseOptions, PromptEnd
from quire_tokenizer.output_parsing.families import HARMONY, REASONING_FAMILIES, TOOL_FAMILIES
from tests.unit.tokenizer.answer_texts import WRITERS, Call, Render
from tests.unit.tokenizer.chat.test_output_parsing import TOOLS

# The reasoning parser that is tried with each tool parser; models of the family have it, where they think at all.
REASONING = {
    "hermes": "qwen3",
    "mistral": "mistral",
    "llama3_json": "deepseek_r1",
    "granite": "granite",
    "phi4_mini_json": "qwen3",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v3",
    "kimi_k2": "kimi_k2",
    "qwen3_coder": "seed_oss",
    "minimax_m2": "minimax_m2",
    "glm45": "glm45",
    "pythonic": "qwen3",
    "openai": "openai_gptoss",
}
# Values of these families stand between tags, so that a string can have neither a tag nor a line break at its end.
_TAGGED = ("qwen3_coder", "minimax_m2", "glm45")
_TEXTS = ("Nîmes", "a b", "汉字", "👍🏽", '6" }', "C:\\x", "x}", "[1", "l1\nl2", "1 < 2", "`", "")
_WORDS = ("I see", "naïve", "汉字", "👩‍👩‍👧", '"so"', "a < b", "{x}", "[1]", "``", "\\n", "Done.", "<b>")
_JUNK = (
    "{",
    "}",
    '"',
    "\\",
    "[",
    "]",
    ",",
    ":",
    "\n",
    " ",
    ">",
    "(",
    "```",
    '{"name": "find"',
    '"arguments": ',
    "é",
    "<",
)


@dataclass(frozen=True)
class Writer:
    """A form in which models of a family write. `has_text`: whether text may come before calls."""

    family: str
    render: Render
    has_text: bool

    @property
    def name(self) -> str:
        """The family and, where it has several forms, the form."""
        form = self.render.__name__
        return self.family if len(WRITERS[self.family]) == 1 else f"{self.family} ({form})"

    @property
    def markers(self) -> frozenset[str]:
        """All markers of its tool parser and its reasoning parser."""
        if self.family == HARMONY:
            return harmony.MARKERS
        return TOOL_FAMILIES[self.family].markers | REASONING_FAMILIES[REASONING[self.family]].markers.all


@dataclass(frozen=True)
class Expected:
    """The parts that a client gets of a well-formed stream."""

    reasoning: str
    content: str
    calls: list[Call]


@dataclass(frozen=True)
class Stream:
    """An answer. `expected` is None where it has junk. If it is `cut_off`, `expected` is that of the whole."""

    text: str
    options: ParseOptions
    expected: Expected | None
    cut_off: bool = False


ALL_WRITERS = [Writer(family, *writer) for family, each in WRITERS.items() for writer in each]


def golden_stream(writer: Writer, seed: int) -> Stream:
    """Return the stream of this seed."""
    chance = random.Random(f"{writer.name} {seed}")
    calls = [_call(writer, chance) for _ in range(chance.choice((0, 1, 1, 1, 2, 3)))]
    content = _sentence(chance) if not calls or (writer.has_text and chance.random() < 0.5) else ""
    if not calls and chance.random() < 0.5:
        marker = chance.choice(sorted(writer.markers))
        content += f" {marker[: chance.randint(1, len(marker) - 1)]}"
    thought = _sentence(chance) if chance.random() < 0.5 else ""
    text, prompt_end = _written(writer, chance, thought, content, calls)
    options = ParseOptions(TOOLS, calls=True, reasoning=True, prompt_end=prompt_end)
    expected = Expected(thought, content, calls)
    if seed % 10 == 8:
        return Stream(
            "".join(chance.choices((*_JUNK, *sorted(writer.markers)), k=chance.randint(3, 14))), options, None
        )
    if seed % 5 == 3:
        return Stream(_with_junk(text, writer, chance), options, None)
    if seed % 5 == 4:
        return Stream(text[: chance.randrange(len(text))], options, expected, cut_off=True)
    return Stream(text, options, expected)


def _sentence(chance: random.Random) -> str:
    return " ".join(("Well", *chance.choices(_WORDS, k=chance.randint(0, 2))))


def _call(writer: Writer, chance: random.Random) -> Call:
    texts = [each for each in _TEXTS if writer.family not in _TAGGED or not set("<>") & set(each)]
    values: dict[str, Any] = {
        "city": chance.choice(texts),
        "days": chance.randint(-99, 10**6),
        "metric": chance.random() < 0.5,
        "share": chance.choice((None, 0.5, -1e-7)),
        "tags": chance.choices((*texts, 7), k=2),
        "where": chance.choice(({}, None, {"a": [1, {"b": "]}"}]})),
    }
    keys = chance.sample(sorted(values), chance.choice((0, 1, 1, 1, 2)))
    return chance.choice(("find", "get_weather")), {key: values[key] for key in keys}


def _written(
    writer: Writer, chance: random.Random, thought: str, content: str, calls: list[Call]
) -> tuple[str, PromptEnd]:
    """Return the answer, and how its prompt ended."""
    answer = writer.render(content, calls)
    if writer.family == HARMONY:
        opening = f"{harmony.CHANNEL}analysis{harmony.MESSAGE}{thought}<|end|>{harmony.START}assistant"
        return (opening if thought else "") + answer, "unknown"
    reasoning = REASONING_FAMILIES[REASONING[writer.family]]
    start, end = reasoning.markers.start, reasoning.markers.end
    if not thought:
        return answer, "answering"
    if reasoning.markers.implied_ends and calls and not content and chance.random() < 0.5:
        end = ""
    if chance.random() < 0.5:
        return f"{thought}\n{end}\n\n{answer}", "thinking"
    return f"{start}\n{thought}\n{end}\n\n{answer}", "unknown"


def _with_junk(text: str, writer: Writer, chance: random.Random) -> str:
    """Put markers, pieces of markers, and pieces of calls into the text."""
    for _ in range(chance.randint(1, 4)):
        junk = chance.choice((*_JUNK, *sorted(writer.markers)))
        at = chance.randint(0, len(text))
        text = text[:at] + junk[: chance.randint(1, len(junk))] + text[at:]
    return text
