"""Finds assignments to attributes of objects whose class another module defines: state must have one writer.

The types are not known to an AST, so names decide. An attribute is ours if any class of the product declares it; a
module may assign it if one of its own classes declares it. Libraries' attributes and protobuf messages do not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Assignment(NamedTuple):
    """`target` is the source text of what is assigned, in a module named by its path."""

    module: str
    target: str


def foreign_assignments(sources: Mapping[str, str]) -> list[Assignment]:
    """All of them in modules given as path -> source text, in the order of the modules and their lines."""
    trees = {path: ast.parse(source) for path, source in sources.items()}
    declared = {path: _declared(tree) for path, tree in trees.items()}
    ours = set().union(*declared.values())
    return [
        Assignment(path, ast.unparse(target))
        for path, tree in trees.items()
        for target in _assigned(tree)
        if target.attr in ours and target.attr not in declared[path]
    ]


def _declared(tree: ast.Module) -> set[str]:
    """Attributes that the classes of a module declare: in __slots__, as annotated fields, or on `self`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        for part in ast.walk(node):
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


def _assigned(tree: ast.Module) -> Iterator[ast.Attribute]:
    """Attributes that are assigned or deleted on anything but `self`, `cls` and messages, once each."""
    generated = _generated_modules(tree)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    makers = {node.name for node in functions if node.returns is not None and _mentions(node.returns, generated)}
    seen: set[ast.Attribute] = set()
    for scope in (*functions, tree) if generated else (tree,):
        messages = _messages(scope, generated, generated | makers) if generated else set[str]()
        for node in ast.walk(scope):
            if not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Load) or node in seen:
                continue
            seen.add(node)
            if not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}) and (
                _root(node.value) not in messages
            ):
                yield node


def _generated_modules(tree: ast.Module) -> set[str]:
    """The names under which a module imports those that protoc generated."""
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if alias.name.endswith("_pb2")
    }


def _messages(scope: ast.AST, generated: set[str], makers: set[str]) -> set[str]:
    """Names in a function that hold protobuf messages: by annotation, by construction, or as a part of one."""
    found: set[str] = set()
    for _ in range(2):  # a part of a message may be named before the walk meets the message itself
        for node in ast.walk(scope):
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
