"""StructuralTags: writes the grammar of a structural tag, which is free text with constrained parts between markers.
The formats are those of xgrammar, as in vLLM:

{"type": "structural_tag", "format": {"type": "tag", "begin": ..., "content": ..., "end": ...}}
{"type": "structural_tag", "structures": [{"begin": ..., "schema": ..., "end": ...}], "triggers": [...]}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from quire_tokenizer.grammar.grammar_source import MAX_CHOICES, bad_grammar, too_large
from quire_tokenizer.grammar.json_schema import prepare_schema
from quire_tokenizer.grammar.lark_grammar import TEXT, LarkGrammar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quire_tokenizer.grammar.grammar_source import GrammarSource

    Format = dict[str, Any]

_MISSING: Final = object()


class StructuralTags:
    """Writes the formats of one structural tag as expressions of a grammar."""

    def __init__(self, grammar: LarkGrammar, source: GrammarSource, warnings: list[str]) -> None:
        self._grammar = grammar
        self._source = source
        self._warnings = warnings
        self._writers: dict[str, Callable[[Format], str]] = {
            "const_string": lambda each: self._grammar.literal(_text(each, "value")),
            "json_schema": lambda each: self._schema(_field(each, "json_schema")),
            "regex": lambda each: self._grammar.add_regex(_text(each, "pattern")),
            "grammar": lambda each: self._grammar.add_lark(lark_of_grammar(_text(each, "grammar"))),
            "any_text": lambda _: TEXT,
            "sequence": self._sequence,
            "or": lambda each: self._any_of([self.expression(one) for one in _list(each, "elements")]),
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def whole_expression(self, value: Any) -> str:
        """Return the expression of a whole structural tag, in either form: a `format`, or `structures` with `triggers`,
        which are written as triggered tags and take precedence. Raises GrammarRefused for any other value."""
        if isinstance(value, dict) and "structures" in value:
            tags = [
                {"begin": _text(each, "begin"), "content": _of_schema(each), "end": _text(each, "end")}
                for each in _list(value, "structures")
            ]
            return self._triggered({"triggers": _list(value, "triggers"), "tags": tags})
        if not isinstance(value, dict) or "format" not in value:
            raise bad_grammar("The structural tag has no format.", 'Send {"type": "structural_tag", "format": ...}.')
        return self.expression(value["format"])

    def expression(self, tag_format: Any) -> str:
        """Return the expression of one format, written by the function for its `type`. Raises GrammarRefused for an
        unknown type or a malformed format."""
        kind = tag_format.get("type") if isinstance(tag_format, dict) else None
        writer = self._writers.get(kind) if isinstance(kind, str) else None
        if writer is None:
            known = ", ".join(sorted(self._writers))
            raise bad_grammar(
                f"The structural tag has a format of the type {str(kind)[:50]!r}.", f"Use one of {known}.", "type"
            )
        return writer(tag_format)

    def _schema(self, value: Any) -> str:
        return self._grammar.add_schema(prepare_schema(value, self._source, self._warnings))

    def _sequence(self, tag_format: Format) -> str:
        """Return the expression of the format's elements, one after another; without elements, that of the empty text.
        Raises GrammarRefused if an element before the last is itself `any_text`, since nothing would end it."""
        elements = _list(tag_format, "elements")
        if any(isinstance(each, dict) and each.get("type") == "any_text" for each in elements[:-1]):
            raise bad_grammar(
                "any_text stands before the end of a sequence: nothing would end it.",
                "Put it last, or into a tag, whose end then ends it.",
                "sequence",
            )
        return " ".join(self.expression(each) for each in elements) or '""'

    def _tag(self, tag_format: Format) -> str:
        begin = _text(tag_format, "begin")
        return self._grammar.add_rule("tag", f"{self._grammar.literal(begin)} {self._rest(tag_format)}")

    def _rest(self, tag_format: Format) -> str:
        """Return the expression of a tag after its begin marker: the content, then one of the end markers. If the
        content is any text, it ends at the first end marker; empty end markers then count only if all are empty. Raises
        GrammarRefused for a tag without an end or content."""
        ends = tag_format.get("end")
        if isinstance(ends, str):
            ends = [ends]
        if not isinstance(ends, list) or not ends or not all(isinstance(each, str) for each in ends):
            raise bad_grammar("A tag has no end.", "Give it a text, or a list of texts, as end.", "end")
        content = _field(tag_format, "content")
        free = isinstance(content, dict) and content.get("type") == "any_text"
        if free and any(ends):
            return self._any_of([self._grammar.until(end) for end in ends if end])
        inner = self.expression(content)
        return f"{inner} {self._any_of([self._grammar.literal(end) for end in ends])}"

    def _triggered(self, tag_format: Format) -> str:
        """Return the expression of free text with tags in it, each of which begins with a trigger. `at_least_one`
        requires a tag, and nothing may follow the first tag with `stop_after_first`. Raises GrammarRefused without
        tags, or for a tag that no trigger begins."""
        triggers, tags = _list(tag_format, "triggers"), _list(tag_format, "tags")
        if not tags:
            raise bad_grammar("triggered_tags has no tags.", "Name at least one.", "tags")
        rests = dict[str, list[str]]()
        for tag in tags:
            begin = _text(tag, "begin")
            trigger = next((t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), None)
            if trigger is None:
                raise bad_grammar(f"No trigger begins the tag {begin[:100]!r}.", "Add one to triggers.", "triggers")
            beyond = begin[len(trigger) :]
            before = f"{self._grammar.literal(beyond)} " if beyond else ""
            rests.setdefault(trigger, []).append(f"{before}{self._rest(tag)}")
        calls = [
            self._grammar.add_rule("triggered", f"{self._grammar.until(trigger)} {self._any_of(each)}")
            for trigger, each in rests.items()
        ]
        any_call, least = self._any_of(calls), bool(tag_format.get("at_least_one"))
        if tag_format.get("stop_after_first"):
            return any_call if least else f"({any_call} | {TEXT})"
        return f"{any_call}{'+' if least else '*'} {TEXT}"

    def _separated(self, tag_format: Format) -> str:
        """Return the expression of tags with a separator between them, and no other text. `at_least_one` requires a
        tag; `stop_after_first` allows one tag at most. Raises GrammarRefused without tags, for a malformed tag, and for
        a missing separator unless `stop_after_first` is set."""
        tags = self._any_of([self._tag(each) for each in _list(tag_format, "tags")])
        if tag_format.get("stop_after_first"):
            return tags if tag_format.get("at_least_one") else f"{tags}?"
        between = _text(tag_format, "separator")
        more = f"({self._grammar.literal(between)} {tags})*" if between else f"{tags}*"
        whole = f"{tags} {more}"
        return whole if tag_format.get("at_least_one") else f"({whole})?"

    def _any_of(self, expressions: Sequence[str]) -> str:
        """Return the expression for any one of these. Raises GrammarRefused for an empty list, or for more than
        MAX_CHOICES."""
        if not expressions:
            raise bad_grammar("The structural tag has a list without elements.", "Name at least one.", "elements")
        if len(expressions) > MAX_CHOICES:
            raise too_large(
                f"The structural tag has {len(expressions)} alternatives, at most {MAX_CHOICES} are possible.",
                "Shorten the list.",
            )
        return expressions[0] if len(expressions) == 1 else self._grammar.add_rule("any_of", " | ".join(expressions))


def lark_of_grammar(text: str) -> str:
    """Return a user's grammar as Lark; EBNF (GBNF) is translated. Raises GrammarRefused for a grammar that cannot be
    translated."""
    # Imported here, since compiling a schema does not need it.
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark: str = any_to_lark(text)
    except Exception as error:  # the library raises bare Exception too, for example for rules that are not there
        raise bad_grammar(f"The grammar is no EBNF: {str(error)[:300]}.", "Correct it, or send Lark.") from error
    return lark


def _of_schema(structure: Format) -> Format:
    return {"type": "json_schema", "json_schema": _field(structure, "schema")}


def _field(tag_format: Any, name: str) -> Any:
    """Return the member `name` of a part of the tag. Raises GrammarRefused if the part is no object or has no such
    member."""
    found = tag_format.get(name, _MISSING) if isinstance(tag_format, dict) else _MISSING
    if found is _MISSING:
        raise bad_grammar(f"A part of the structural tag has no {name}.", f"Add {name}.", name)
    return found


def _text(tag_format: Any, name: str) -> str:
    """Return the member `name` of a part of the tag. Raises GrammarRefused if it is missing or is no text."""
    found = _field(tag_format, name)
    if not isinstance(found, str):
        raise bad_grammar(f"{name} of a structural tag is no text.", "Send a text.", name)
    return found


def _list(tag_format: Any, name: str) -> list[Any]:
    """Return the member `name` of a part of the tag; the items are not checked. Raises GrammarRefused if it is missing
    or is no list."""
    found = _field(tag_format, name)
    if not isinstance(found, list):
        raise bad_grammar(f"{name} of a structural tag is no list.", "Send a list.", name)
    return found
