"""One chat template, compiled in an immutable sandbox with Hugging Face's conventions.

It is used in rendering processes, and once at the start to compile the model's template. It does not limit time or
memory; its process does. It knows nothing of tokens.
"""

from __future__ import annotations

import datetime
import json
import re
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire_tokenizer.chat import stand_ins

if TYPE_CHECKING:
    from jinja2.parser import Parser

_PROBE = "q7u1r3probe"
_PROBE_CHARS = 1 << 20
# All but ASCII and the symbols that stand for other characters while a conversation is rendered (see provenance.py).
_ESCAPABLE = re.compile(f"(?![{stand_ins.RANGE}])[^\x00-\x7f]")


class TemplateRefused(TemplateError):
    """The template itself refused the conversation, by `raise_exception`."""


class OutputTooLarge(Exception):
    """The rendered text is longer than allowed."""


class ChatTemplate:
    """Compiles on construction; raises jinja2.TemplateSyntaxError."""

    def __init__(self, source: str) -> None:
        self._template = _environment().from_string(source)
        self._takes_parts: bool | None = None

    def render(self, variables: dict[str, Any], max_chars: int) -> str:
        """Return the text of the conversation. Each message's content is first put into the form that the template
        reads. Raises OutputTooLarge for more than `max_chars` characters, and whatever the template raises."""
        variables = variables | {"messages": [self._adapted(message) for message in variables["messages"]]}
        return self._generate(variables, max_chars)

    def _adapted(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message with its content as the template reads it. A template that takes parts gets a string as a
        list of one text part. Any other template gets a list of parts as one string, the texts joined by line
        breaks."""
        content = message.get("content")
        if isinstance(content, list) and not self.takes_parts:
            return message | {"content": "\n".join(part["text"] for part in content)}
        if isinstance(content, str) and self.takes_parts:
            return message | {"content": [{"type": "text", "text": content}]}
        return message

    @property
    def takes_parts(self) -> bool:
        """Whether the template shows the text of content that is a list of parts, and drops (or fails on) a string.
        The first use finds it out by rendering a probe in both forms. A template that merely prints the list does not
        count."""
        if self._takes_parts is None:
            as_string = self._try(_PROBE)
            as_parts = self._try([{"type": "text", "text": _PROBE}])
            # A list that is merely printed shows its punctuation.
            read = _PROBE in as_parts and not re.search(rf"""['"]text['"]: *['"]{_PROBE}""", as_parts)
            self._takes_parts = _PROBE not in as_string and read
        return self._takes_parts

    def _try(self, content: str | list[dict[str, str]]) -> str:
        """Render one user message with this content. Returns an empty text if the template raises an error or writes
        more than _PROBE_CHARS characters."""
        variables = {"messages": [{"role": "user", "content": content}], "add_generation_prompt": True}
        try:
            return self._generate(variables, max_chars=_PROBE_CHARS)
        except Exception:  # the template may raise anything for a form that it does not know
            return ""

    def _generate(self, variables: dict[str, Any], max_chars: int) -> str:
        """Render piece by piece, and return the text. Raises OutputTooLarge as soon as there are more than `max_chars`
        characters, and whatever the template raises."""
        pieces, chars = [], 0
        for piece in self._template.generate(variables):
            chars += len(piece)
            if chars > max_chars:
                raise OutputTooLarge
            pieces.append(piece)
        return "".join(pieces)


class _GenerationTag(Extension):
    """`{% generation %}` marks what the model is to learn in training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance's set

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the tag, and the body up to `endgeneration`, to a scope node that renders the body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """Make the immutable sandbox in which templates are compiled, with Hugging Face's conventions: trimmed blocks, loop
    controls, `{% generation %}`, the filter `tojson`, and the functions `raise_exception` and `strftime_now`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as JSON. Unlike jinja2's filter of this name, it escapes no HTML characters. `ensure_ascii`
    escapes all characters beyond ASCII but the symbols that stand for a user's characters during rendering (see
    stand_ins.py)."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _ESCAPABLE.sub(lambda m: json.dumps(m[0])[1:-1], text) if ensure_ascii else text


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefused(str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
