"""The table of disturbed answers: which form an answer must have, and what happens while it comes. Made from seeds."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from quire import ChatPrompt, SamplingParams, StructuredOutputsParams
from tests.chaos.scripts import LINES

CUT, MATCHER, WORKER, SCHEDULER, TOKENIZER = "cut", "matcher", "worker", "scheduler", "tokenizer"
KILLS = (MATCHER, WORKER, SCHEDULER, TOKENIZER)
_COMPANY = 12
_MAX_TOKENS = 120
_WORD = {"type": "string", "pattern": "^[a-z]{1,8}$"}
_ITEM = {
    "type": "object",
    "properties": {"name": _WORD, "size": {"enum": ["small", "large"]}, "count": {"type": "integer", "maximum": 99}},
    "required": ["name", "size", "count"],
    "additionalProperties": False,
}
_NESTED = {
    "type": "object",
    "properties": {
        "items": {"type": "array", "items": _ITEM, "minItems": 1, "maxItems": 3},
        "note": {"anyOf": [{"type": "null"}, _WORD]},
    },
    "required": ["items", "note"],
    "additionalProperties": False,
}
_TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in (("build", _ITEM), ("list_all", _NESTED))
]
# Kind and text of each form, as StructuredOutputsParams takes them; for tools, OpenAI's `tool_choice`.
FORMS: tuple[tuple[str, Any], ...] = (
    ("json", _ITEM),
    ("json", _NESTED),
    ("json", {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "maxItems": 9}),
    ("json", {"type": "object", "properties": {"a": {"const": 1}, "b": {"type": "array", "items": _WORD}}}),
    ("regex", r"([a-z]{1,9} ){4,20}[A-Z]{3}"),
    ("regex", r"(north|south)-[0-9]{4,12}(, [a-f]{2,5})*\."),
    ("choice", ["to be", "not to be", "that is the question"]),
    ("grammar", 'root ::= "(" root ")" | [a-c]+ ("," root)?'),
    ("tools", "required"),
    ("tools", {"type": "function", "function": {"name": "list_all"}}),
)


@dataclass(frozen=True)
class Scenario:
    """An answer, and what happens to it: each of `events` behind a share of its tokens. `split`: whether prefill and
    decode are at different replicas. `company`: plain requests beside it, which take the pages that it needs."""

    number: int
    split: bool
    kind: str
    form: Any
    n: int
    temperature: float
    company: int
    events: tuple[tuple[float, str], ...]

    @property
    def params(self) -> SamplingParams:
        form = None if self.kind == "tools" else StructuredOutputsParams(**{self.kind: self.form})
        return SamplingParams(
            temperature=self.temperature,
            seed=self.number,
            n=self.n,
            max_tokens=_MAX_TOKENS,
            structured_outputs=form,
        )

    @property
    def prompt(self) -> str | ChatPrompt:
        """Long enough to be prefilled at another replica."""
        text = f"SCENE {self.number}.\n" + "".join(random.Random(self.number).choices(LINES, k=10))
        if self.kind != "tools":
            return text
        messages = [{"role": "user", "content": text}]
        return ChatPrompt(messages, _TOOLS, tool_choice=self.form, separate=True)

    def __str__(self) -> str:
        where = "prefill and decode apart" if self.split else "whole replicas"
        form = json.dumps(self.form)[:40]
        return f"{self.number}: {self.kind} {form}, n {self.n}, {where}, {self.company} beside, {self.events}"


def make_scenario(number: int) -> Scenario:
    """Return the scenario of this number. Each form is served by whole replicas and by prefill and decode apart in
    turn. Every third scenario has four siblings."""
    chance = random.Random(f"disturbed {number}")
    kind, form = FORMS[number % len(FORMS)]
    kill = [chance.choice(KILLS)] if chance.random() < 0.8 else []
    events = [*kill, *[CUT] * chance.choice((0, 1, 1, 2))] or [CUT]
    return Scenario(
        number,
        split=number // len(FORMS) % 2 == 1,
        kind=kind,
        form=form,
        n=4 if number % 3 == 0 else 1,
        temperature=chance.choice((0.0, 0.7, 1.0)),
        company=_COMPANY if chance.random() < 0.4 else 0,
        events=tuple(sorted((round(chance.uniform(0.05, 0.9), 2), event) for event in events)),
    )
