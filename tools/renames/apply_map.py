"""Applies a map to the working tree. It moves files with `git mv`, and rewrites identifiers, imports and strings with
libcst, so that layout and comments stay unchanged."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import libcst as cst
from libcst.helpers import get_full_name_for_node

from tools.renames.rename_map import path_of

if TYPE_CHECKING:
    from tools.renames.rename_map import RenameMap


class Rewriter(cst.CSTTransformer):
    """Rewrites one file."""

    def __init__(self, renames: RenameMap, path: str) -> None:
        super().__init__()
        self._renames = renames
        self._path = path
        self._definitions: list[str] = []
        # Names that are attributes or members of a class, by identity; those that import statements have are apart.
        self._members: set[int] = set()
        # Arguments by keyword, and for them and for attributes what has them.
        self._keywords: set[int] = set()
        self._owner_of: dict[int, str] = {}
        self._classes: list[str] = [""]
        self._imported: set[int] = set()
        self._slots: set[int] = set()
        # Modules that are imported by name, and are called otherwise afterwards.
        self._aliases: dict[str, str] = {}

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self._classes.append(node.name.value)
        for statement in node.body.body:
            if isinstance(statement, cst.FunctionDef):
                self._members.add(id(statement.name))
            elif isinstance(statement, cst.SimpleStatementLine):
                for small in statement.body:
                    self._visit_member(small)
        self._definitions.append(node.name.value)

    def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> cst.ClassDef:
        self._definitions.pop()
        self._classes.pop()
        return updated_node

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._definitions.append(node.name.value)

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        self._definitions.pop()
        if id(original_node.name) in self._members:
            new = self._new("attribute", original_node.name.value, self._classes[-1])
        else:
            new = self._new("name", original_node.name.value)
        return updated_node.with_changes(name=updated_node.name.with_changes(value=new))

    def visit_Attribute(self, node: cst.Attribute) -> None:
        self._members.add(id(node.attr))
        of_self = isinstance(node.value, cst.Name) and node.value.value == "self"
        self._owner_of[id(node.attr)] = self._classes[-1] if of_self else _last_name(node.value)

    def visit_Call(self, node: cst.Call) -> None:
        for argument in node.args:
            if argument.keyword is not None:
                self._keywords.add(id(argument.keyword))
                self._owner_of[id(argument.keyword)] = _last_name(node.func)

    def visit_MatchKeywordElement(self, node: cst.MatchKeywordElement) -> None:
        self._members.add(id(node.key))

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        if id(original_node) in self._imported:
            return updated_node
        kind = "attribute" if id(original_node) in self._members else "name"
        if id(original_node) in self._keywords:
            kind = "keyword"
        old = original_node.value
        new = self._new(kind, old, self._owner_of.get(id(original_node), self._classes[-1]))
        if kind == "name" and new == old:
            new = self._aliases.get(old, old)
        return updated_node.with_changes(value=new)

    def leave_SimpleString(self, original_node: cst.SimpleString, updated_node: cst.SimpleString) -> cst.SimpleString:
        value = original_node.raw_value
        kind = "attribute" if id(original_node) in self._slots else "string"
        new = self._new(kind, value, self._classes[-1])
        if new == value:
            new = self._renames.module(value)
        return (
            updated_node.with_changes(value=original_node.value.replace(value, new)) if new != value else updated_node
        )

    def visit_Import(self, node: cst.Import) -> bool:
        return False

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> cst.Import:
        names = [
            alias.with_changes(name=_dotted(self._renames.module(_full(alias.name)))) for alias in original_node.names
        ]
        return updated_node.with_changes(names=names)

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def leave_ImportFrom(
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.ImportFrom | cst.FlattenSentinel[cst.ImportFrom]:
        if original_node.module is None or isinstance(original_node.names, cst.ImportStar):
            return updated_node
        module = _full(original_node.module)
        by_module: dict[str, list[cst.ImportAlias]] = {}
        for alias in original_node.names:
            old = _full(alias.name)
            moved = self._renames.module(f"{module}.{old}")
            if f"{module}.{old}" in self._renames.modules:
                package, _, new = moved.rpartition(".")
                if alias.asname is None and new != old:
                    self._aliases[old] = new
            else:
                package, new = self._renames.module(module), self._new("name", old)
            by_module.setdefault(package, []).append(
                alias.with_changes(name=cst.Name(new), comma=cst.MaybeSentinel.DEFAULT)
            )
        if len(by_module) == 1:
            ((package, aliases),) = by_module.items()
            return updated_node.with_changes(module=_dotted(package), names=aliases)
        imports = [cst.ImportFrom(module=_dotted(package), names=aliases) for package, aliases in by_module.items()]
        return cst.FlattenSentinel(imports)

    def _visit_member(self, small: cst.BaseSmallStatement) -> None:
        if isinstance(small, cst.AnnAssign) and isinstance(small.target, cst.Name):
            self._members.add(id(small.target))
        if isinstance(small, cst.Assign):
            for target in small.targets:
                if isinstance(target.target, cst.Name):
                    self._members.add(id(target.target))
                    if target.target.value == "__slots__" and isinstance(small.value, cst.Tuple | cst.List):
                        self._slots.update(id(element.value) for element in small.value.elements)

    def _new(self, kind: str, old: str, owner: str = "") -> str:
        return self._renames.renamed(kind, old, self._path, ".".join(self._definitions), owner)


def rewrite(source: str, renames: RenameMap, path: str) -> str:
    """Return a file's text with the map applied; `path` is the file's old path."""
    return cst.parse_module(source).visit(Rewriter(renames, path)).code


def apply_map(root: Path, renames: RenameMap) -> list[str]:
    """Rewrite all Python files that git tracks, and move the files of modules that move. Returns the changed files."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=root, capture_output=True, text=True, check=True)
    changed = []
    words = {rule.old for rule in renames.rules} | {old.rpartition(".")[2] for old in renames.modules}
    for path in listed.stdout.splitlines():
        source, target = (root / path).read_text(), path_of(path, renames)
        # Parsing takes long, and most files have none of the words.
        text = rewrite(source, renames, path) if any(word in source for word in words) else source
        if text != source:
            (root / path).write_text(text)
        if target != path:
            (root / target).parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["git", "mv", path, target], cwd=root, check=True)
        if text != source or target != path:
            changed.append(target)
    return changed


def _last_name(node: cst.CSTNode) -> str:
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        return node.attr.value
    return _last_name(node.func) if isinstance(node, cst.Call) else ""


def _full(node: cst.CSTNode) -> str:
    return get_full_name_for_node(node) or ""


def _dotted(name: str) -> cst.Name | cst.Attribute:
    first, *rest = name.split(".")
    node: cst.Name | cst.Attribute = cst.Name(first)
    for part in rest:
        node = cst.Attribute(node, cst.Name(part))
    return node
