"""LarkGrammar: writes a grammar in llguidance's dialect of Lark, rule by rule.

Its rules may refer to subgrammars: JSON schemas, regular expressions and a user's own grammars. The same calls give the
same text.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher

from quire_tokenizer.grammar.json_text import canonical_json

if TYPE_CHECKING:
    from collections.abc import Mapping

TEXT = "TEXT"
"""The terminal for text of any length, without special tokens."""
_TOP = "answer"


class LarkGrammar:
    """A grammar under construction. `added`: the ids of the tokens that were added to the vocabulary, by their text.
    llguidance never matches such a token against text, so literals name it by its id.

    An *expression* is the right-hand side of a rule, or a part of it.
    """

    def __init__(self, added: Mapping[str, int]) -> None:
        self._added = added
        self._added_tokens = (
            re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True)))) if added else None
        )
        self._rules: list[str] = []
        self._subgrammars: list[dict[str, Any]] = []

    def add_rule(self, name: str, expression: str, options: str = "") -> str:
        """Add a rule. Returns its name, made unique, as an expression."""
        unique = f"{name}_{len(self._rules)}"
        self._rules.append(f"{unique}{options}: {expression}")
        return unique

    def literal(self, text: str) -> str:
        """Return the expression that matches a text: quoted strings in turn with the ids of the added tokens in the
        text. The expression of an empty text is `""`."""
        if not text:
            return '""'
        if self._added_tokens is None:
            return quoted(text)
        parts, at = list[str](), 0
        for found in self._added_tokens.finditer(text):
            if found.start() > at:
                parts.append(quoted(text[at : found.start()]))
            parts.append(token(self._added[found[0]]))
            at = found.end()
        if at < len(text):
            parts.append(quoted(text[at:]))
        return " ".join(parts)

    def is_token(self, text: str) -> bool:
        """Whether a text is an added token."""
        return text in self._added

    def until(self, end: str) -> str:
        """Return the expression for the shortest text that ends with `end`, including the end: a lazy rule up to the
        first added token of `end`, then the rest as a literal. If `end` begins with an added token, any text without
        special tokens comes before `end`."""
        first = self._added_tokens.search(end) if self._added_tokens is not None else None
        if first is not None and first.start() == 0:
            return f"{TEXT} {self.literal(end)}"
        stop = end if first is None else end[: first.start()]
        lazy = self.add_rule("until", f"/(?s:.*){_escaped(stop)}/", "[lazy]")
        rest = end[len(stop) :]
        return f"{lazy} {self.literal(rest)}" if rest else lazy

    def add_schema(self, schema: dict[str, Any]) -> str:
        """Add a JSON schema. Returns an expression for it."""
        return self._add_subgrammar("schema", {"json_schema": schema})

    def add_lark(self, text: str) -> str:
        """Add a complete grammar, whose first rule is `start`. Returns an expression for it."""
        return self._add_subgrammar("lark", {"lark_grammar": text})

    def add_regex(self, pattern: str) -> str:
        """Add a regular expression. Returns an expression for it."""
        return self.add_lark(lark_of_regex(pattern))

    def text(self, start: str) -> str:
        """Return the whole grammar as canonical JSON: the rules, with `start` as the expression of an answer, the
        terminal TEXT if it is used, and the subgrammars."""
        rules = "\n".join([f"start: {start}", *self._rules])
        if TEXT in rules:
            rules += f"\n{TEXT}: /(?s:.*)/"
        return canonical_json({"grammars": [{"name": _TOP, "lark_grammar": rules}, *self._subgrammars]})

    def _add_subgrammar(self, kind: str, body: dict[str, Any]) -> str:
        """Add a subgrammar with this body, unless an equal one was added before. `kind` begins its name. Returns its
        name as an expression."""
        for known in self._subgrammars:
            if {**known, "name": ""} == {"name": "", **body}:
                return f"@{known['name']}"
        name = f"{kind}_{len(self._subgrammars)}"
        self._subgrammars.append({"name": name, **body})
        return f"@{name}"


def quoted(text: str) -> str:
    """Return a string literal of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def token(number: int) -> str:
    """Return the expression for one token, by its id."""
    return f"<[{number}]>"


def lark_of_regex(pattern: str) -> str:
    """Return the Lark grammar of a regular expression."""
    text: str = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]
    return text


def _escaped(text: str) -> str:
    """Return a regular expression for `/.../` that matches this text."""
    return re.sub(r"([/\\.+*?()|\[\]{}^$#&~-])", r"\\\1", text).replace("\n", "\\n").replace("\r", "\\r")
