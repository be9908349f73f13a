"""The Python files of this repository, for tests that read all of them. A process reads each file once, and looks for
its imports once."""

from __future__ import annotations

import ast
import functools
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ROOT / "quire" / "v1"


class Import(NamedTuple):
    """`import module`, where `name` is empty, or `from module import name`; `for_types` in a block of TYPE_CHECKING."""

    module: str
    name: str
    for_types: bool


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if GENERATED not in path.parents and "__pycache__" not in path.parts]


def ours() -> list[Path]:
    return [*sources("quire", "services", "bench", "tools", "tests"), ROOT / "hatch_build.py"]


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text()


def may_name(text: str, *words: str) -> bool:
    """Whether an identifier or keyword of a module can contain one of these words. Python normalizes identifiers: it
    reads some letters beyond ASCII as plain ones."""
    plain = text if text.isascii() else unicodedata.normalize("NFKC", text)
    return any(word in plain for word in words)


def nodes_of(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a tree but contexts such as Load, as `ast.walk` yields them, in half of its time."""
    ahead = [tree]
    for node in ahead:  # which grows meanwhile
        yield node
        for value in vars(node).values():
            if isinstance(value, list):
                ahead += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                ahead.append(value)


@functools.cache
def imports_of(path: Path) -> tuple[Import, ...]:
    return tuple(imports_in(text_of(path)))


def imports_in(source: str) -> Iterator[Import]:
    """Everything that a module imports by an absolute name, wherever in it."""
    return _imports(ast.parse(source).body, for_types=False)


def _imports(statements: Iterable[ast.AST], *, for_types: bool) -> Iterator[Import]:
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (Import(alias.name, "", for_types) for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            if statement.module and statement.level == 0:
                yield from (Import(statement.module, alias.name, for_types) for alias in statement.names)
        else:
            inside = for_types or (isinstance(statement, ast.If) and _is_for_types(statement.test))
            for block in ("body", "orelse", "finalbody", "handlers", "cases"):
                yield from _imports(getattr(statement, block, ()), for_types=inside)


def _is_for_types(test: ast.expr) -> bool:
    names = (getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(test))
    return "TYPE_CHECKING" in names
