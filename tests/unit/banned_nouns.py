"""Private nouns that no identifier has, each with the field's words for the same thing (see docs/glossary.md).

Names of the wire, of flags and of metrics stay as users know them; ordinary English in prose is not looked at.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from tests.unit.source_files import may_name, nodes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

BANNED = {
    "bell": "event",
    "blame": "poison request",
    "cargo": "page transfer",
    "carrier": "KV connector",
    "desk": "manager, registry",
    "door": "listener",
    "flight": "in-flight step",
    "harvest": "update_from_output",
    "ladder": "tier manager",
    "landing": "page sink",
    "loan": "reference",
    "medium": "tier backend",
    "mover": "KV transfer agent",
    "nucleus": "top-p",
    "outbox": "delta queue",
    "pulse": "liveness monitor",
    "sheet": "logits processor state",
    "shelf": "CUDA graph cache",
    "shipment": "page source",
    "tenure": "slot generation",
    "turnstile": "rate limiter",
    "upstairs": "callbacks",
    "wish": "placement request",
}
# As users know them: fields of the wire, and flags.
EXEMPT = {"medium", "mover_ring_bytes"}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of everything that a module names, and of what it uses."""
    for node in nodes_of(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Name):
            yield line, node.id
        elif isinstance(node, ast.Attribute):
            yield line, node.attr
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            yield line, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.alias):
            yield line, node.name


def banned_in(name: str) -> list[str]:
    """The banned nouns that a name is made of. What is in flight is the field's own."""
    if name in EXEMPT:
        return []
    words = [word.lower() for word in _WORD.findall(name)]
    return [word for before, word in zip(["", *words], words, strict=False) if word in BANNED and before != "in"]


def banned_names(source: str) -> list[str]:
    """Identifiers of a module that contain a banned noun, each with its line, its name, and the words to use."""
    if not may_name(source.lower(), *BANNED):
        return []
    found = {(line, name, word) for line, name in identifiers(ast.parse(source)) for word in banned_in(name)}
    return [f"{line}: {name} (say {BANNED[word]})" for line, name, word in sorted(found)]
