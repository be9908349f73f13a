"""Finds assignments to attributes of objects whose class another module defines: state must have one writer.

The types are not known to an AST, so names decide. An attribute is ours if any class of the product declares it; a
module may assign it if one of its own classes declares it. Libraries' attributes and protobuf messages do not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tests.unit.source_files import nodes_of

_LOOKED_AT = frozenset(
    (
        ast.AnnAssign, ast.Assign, ast.AsyncFunctionDef, ast.Attribute, ast.ClassDef, ast.For, ast.FunctionDef,
        ast.Import, ast.ImportFrom, ast.arg,
    )
)  # fmt: skip


class Assignment(NamedTuple):
    """`target` is the source text of what is assigned, in a module named by its path."""

    module: str
    target: str


def foreign_assignments(sources: Mapping[str, str]) -> list[Assignment]:
    """All of them in modules given as path -> source text, in the order of the modules and their lines."""
    declared: dict[str, set[str]] = {}
    assigned: dict[str, list[ast.Attribute]] = {}
    for path, source in sources.items():
        nodes = _nodes(ast.parse(source))
        declared[path], assigned[path] = _declared(nodes), list(_assigned(nodes))
    ours = set().union(*declared.values())
    return [
        Assignment(path, ast.unparse(target))
        for path, targets in assigned.items()
        for target in targets
        if target.attr in ours and target.attr not in declared[path]
    ]


def _nodes(tree: ast.AST) -> list[ast.AST]:
    """The parts of a tree that this module looks at, a fifth of all."""
    return [node for node in nodes_of(tree) if type(node) in _LOOKED_AT]


def _declared(nodes: Iterable[ast.AST]) -> set[str]:
    """Attributes that the classes of a module declare: in __slots__, as annotated fields, or on `self`."""
    found: set[str] = set()
    seen: set[ast.AST] = set()
    for node in nodes:
        if not isinstance(node, ast.ClassDef) or node in seen:
            continue
        for part in _nodes(node):
            if isinstance(part, ast.ClassDef):
                seen.add(part)
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                found.add(part.target.id)
            elif isinstance(part, ast.Assign) and any(_is_name(target, "__slots__") for target in part.targets):
                found.update(
                    item.value
                    for item in ast.walk(part.value)
                    if isinstance(item, ast.Constant) and isinstance(item.value, str)
                )
            elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and _is_name(part.value, "self"):
                found.add(part.attr)
    return found


def _assigned(nodes: Sequence[ast.AST]) -> Iterator[ast.Attribute]:
    """Attributes that are assigned or deleted on anything but `self`, `cls` and messages, once each."""
    generated = _generated_modules(nodes)
    functions = []
    if generated:
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    makers = {node.name for node in functions if node.returns is not None and _mentions(node.returns, generated)}
    seen: set[ast.Attribute] = set()
    for scope in (*map(_nodes, functions), nodes):
        messages = _messages(scope, generated, generated | makers) if generated else set[str]()
        for node in scope:
            if not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Load) or node in seen:
                continue
            seen.add(node)
            if not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}) and (
                _root(node.value) not in messages
            ):
                yield node


def _generated_modules(nodes: Iterable[ast.AST]) -> set[str]:
    """The names under which a module imports those that protoc generated."""
    return {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if alias.name.endswith("_pb2")
    }


def _messages(scope: Iterable[ast.AST], generated: set[str], makers: set[str]) -> set[str]:
    """Names in a function that hold protobuf messages: by annotation, by construction, or as a part of one."""
    found: set[str] = set()
    for _ in range(2):  # a part of a message may be named before the walk meets the message itself
        for node in scope:
            if isinstance(node, ast.arg) and node.annotation is not None and _mentions(node.annotation, generated):
                found.add(node.arg)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                if _mentions(node.annotation, generated):
                    found.add(node.target.id)
            elif isinstance(node, ast.Assign) and _root(node.value) in found | makers:
                found.update(target.id for target in node.targets if isinstance(target, ast.Name))
            elif isinstance(node, ast.For) and isinstance(node.target, ast.Name) and _root(node.iter) in found:
                found.add(node.target.id)
    return found


def _mentions(annotation: ast.expr, generated: set[str]) -> bool:
    """Whether a type is a message, or made of messages."""
    return any(isinstance(node, ast.Name) and node.id in generated for node in ast.walk(annotation))


def _root(node: ast.expr) -> str:
    """The name at the beginning of `name.a.b(...)[c]`."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
