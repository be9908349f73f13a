"""Proves that a commit renamed by a map and did nothing else. It applies the map to the syntax trees of the parent
commit, and compares the result with the trees of the commit. Docstrings do not count, nor does the order of imports, of
`__slots__` and of `__all__`.

The rules are written a second time here, for Python's own trees, so that the proof does not depend on the rewriter. If
two names of one function, or two members of one class, become one, the trees could still be equal. So this module
reports such names too.
"""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tools.renames.rename_map import path_of

if TYPE_CHECKING:
    from tools.renames.rename_map import RenameMap

_SORTED = ("__slots__", "__all__")


class _Renamer(ast.NodeTransformer):
    def __init__(self, renames: RenameMap, path: str) -> None:
        self._renames = renames
        self._path = path
        self._definitions: list[str] = []
        self._aliases: dict[str, str] = {}
        self._members: set[int] = set()
        self._slots: set[int] = set()
        self._functions: list[dict[str, str]] = []
        self._classes: list[dict[str, str]] = []
        # What has an attribute: the innermost class, or the last name before a dot or a call's bracket.
        self._owners: list[str] = [""]
        self._callees: dict[int, str] = {}
        self.merged: set[str] = set()

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        name = self._new("name", node.name)
        for statement in node.body:
            targets: list[ast.expr] = []
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                self._members.add(id(statement))
            elif isinstance(statement, ast.AnnAssign):
                targets = [statement.target]
            elif isinstance(statement, ast.Assign):
                targets = statement.targets
                if _assigns(statement, ("__slots__",)) and isinstance(statement.value, ast.Tuple | ast.List):
                    self._slots.update(map(id, statement.value.elts))
            self._members.update(id(target) for target in targets if isinstance(target, ast.Name))
        self._classes.append({})
        self._owners.append(node.name)
        self._inside(node, node.name)
        self._owners.pop()
        self._classes.pop()
        node.name = name
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if id(node) in self._members:
            node.id = self._new("attribute", node.id, member=True, owner=self._owners[-1])
        else:
            new = self._new("name", node.id)
            node.id = self._aliases.get(node.id, node.id) if new == node.id else new
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
        owner = self._owners[-1] if of_self else _last_name(node.value)
        self.generic_visit(node)
        node.attr = self._new("attribute", node.attr, member=of_self, owner=owner)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self._callees.update((id(keyword), _last_name(node.func)) for keyword in node.keywords)
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        self.generic_visit(node)
        node.arg = self._new("name", node.arg)
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        self.generic_visit(node)
        if node.arg is not None:
            node.arg = self._new("keyword", node.arg, owner=self._callees.get(id(node), ""))
        return node

    def visit_MatchClass(self, node: ast.MatchClass) -> ast.AST:
        self.generic_visit(node)
        node.kwd_attrs = [self._new("attribute", name) for name in node.kwd_attrs]
        return node

    def visit_MatchAs(self, node: ast.MatchAs) -> ast.AST:
        self.generic_visit(node)
        if node.name is not None:
            node.name = self._new("name", node.name)
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        self.generic_visit(node)
        if node.name is not None:
            node.name = self._new("name", node.name)
        return node

    def visit_Global(self, node: ast.Global) -> ast.AST:
        node.names = [self._new("name", name) for name in node.names]
        return node

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.AST:
        node.names = [self._new("name", name) for name in node.names]
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            kind = "attribute" if id(node) in self._slots else "string"
            new = self._new(kind, node.value, owner=self._owners[-1])
            node.value = self._renames.module(node.value) if new == node.value else new
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        """Skip the text between the braces of an f-string, because it is not a string literal."""
        node.values = [each if isinstance(each, ast.Constant) else self.visit(each) for each in node.values]
        return node

    def visit_Import(self, node: ast.Import) -> ast.AST:
        node.names = [ast.alias(self._renames.module(alias.name), alias.asname) for alias in node.names]
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | list[ast.AST]:
        if node.module is None:
            return node
        by_module: dict[str, list[ast.alias]] = {}
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            if whole in self._renames.modules:
                package, _, new = self._renames.module(whole).rpartition(".")
                if alias.asname is None and new != alias.name:
                    self._aliases[alias.name] = new
            else:
                package, new = self._renames.module(node.module), self._new("name", alias.name)
            by_module.setdefault(package, []).append(ast.alias(new, alias.asname))
        return [ast.ImportFrom(package, aliases, node.level) for package, aliases in by_module.items()]

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        kind = "attribute" if id(node) in self._members else "name"
        name = self._new(kind, node.name, member=kind == "attribute", owner=self._owners[-1])
        self._functions.append({})
        self._inside(node, node.name)
        self._functions.pop()
        node.name = name
        return node

    def _inside(self, node: ast.AST, name: str) -> None:
        self._definitions.append(name)
        self.generic_visit(node)
        self._definitions.pop()

    def _new(self, kind: str, old: str, *, member: bool = False, owner: str = "") -> str:
        definition = ".".join(self._definitions)
        new = self._renames.renamed(kind, old, self._path, definition, owner)
        for names in self._classes[-1:] if member else self._functions if kind == "name" else ():
            if (other := names.setdefault(new, old)) != old:
                self.merged.add(f"{self._path}: {' and '.join(sorted((other, old)))} of {definition} become {new}")
        return new


def normal_form(source: str, renames: RenameMap | None = None, path: str = "") -> str:
    """Return the tree of a file, with the map applied if there is one, as text. Two files with the same code give the
    same text."""
    tree = ast.parse(source)
    _strip_docstrings(tree)
    if renames is not None:
        tree = cast("ast.Module", _Renamer(renames, path).visit(tree))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            _sort_imports(body)
        if isinstance(node, ast.Assign) and _assigns(node, _SORTED) and isinstance(node.value, ast.Tuple | ast.List):
            node.value.elts.sort(key=ast.dump)
    return ast.dump(tree)


def merged(source: str, renames: RenameMap, path: str) -> list[str]:
    """Return the names of a function, and the members of a class, that the map merges into one."""
    renamer = _Renamer(renames, path)
    renamer.visit(ast.parse(source))
    return sorted(renamer.merged)


def differences(root: Path, commit: str, renames: RenameMap) -> list[str]:
    """Return the files of a commit whose code is not the parent's code with the map applied, and the names that the map
    merges."""
    before, after = _python_files(root, f"{commit}^"), _python_files(root, commit)
    wanted = {path_of(path, renames): normal_form(source, renames, path) for path, source in before.items()}
    found = {path: normal_form(source) for path, source in after.items()}
    nothing = normal_form("")
    names = sorted({*wanted, *found})
    one = [each for path, source in before.items() for each in merged(source, renames, path)]
    return one + [name for name in names if wanted.get(name, nothing) != found.get(name, nothing)]


def _python_files(root: Path, revision: str) -> dict[str, str]:
    listed = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", revision], cwd=root, capture_output=True, text=True, check=True
    )
    paths = [path for path in listed.stdout.splitlines() if path.endswith(".py")]
    asked = "".join(f"{revision}:{path}\n" for path in paths)
    told = subprocess.run(
        ["git", "cat-file", "--batch"], cwd=root, input=asked.encode(), capture_output=True, check=True
    )
    found, at = dict[str, str](), 0
    for path in paths:
        end = told.stdout.index(b"\n", at)
        size = int(told.stdout[at:end].split()[2])
        found[path] = told.stdout[end + 1 : end + 1 + size].decode()
        at = end + size + 2
    return found


def _strip_docstrings(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [each for each in body if not _is_text(each)]
            body[:] = kept or ([] if isinstance(node, ast.Module) else [ast.Pass()])


def _is_text(statement: object) -> bool:
    """Whether a statement is a docstring, or the text after a field."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _sort_imports(body: list[ast.stmt]) -> None:
    imports = [each for each in body if isinstance(each, ast.Import | ast.ImportFrom)]
    aliases = [
        ast.ImportFrom(each.module, [alias], each.level) if isinstance(each, ast.ImportFrom) else ast.Import([alias])
        for each in imports
        for alias in each.names
    ]
    rest = [each for each in body if not isinstance(each, ast.Import | ast.ImportFrom)]
    body[:] = [*sorted(aliases, key=ast.dump), *rest]


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    return _last_name(node.func) if isinstance(node, ast.Call) else ""


def _assigns(statement: ast.Assign, names: tuple[str, ...]) -> bool:
    return any(isinstance(target, ast.Name) and target.id in names for target in statement.targets)
