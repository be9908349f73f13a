"""A map of renames, read from TOML.

[[module]]                      # a module or a package moves; imports and strings that name it follow
old = "quire_scheduler.bell"
new = "quire_scheduler.service.event"

[[name]]                        # classes, functions, constants, variables and parameters
old = "Bell"
new = "Event"
scope = ["services/scheduler/**", "tests/**"]   # files; all of them unless said

[[attribute]]                   # methods, fields, and arguments that are given by keyword
old = "ring"
new = "set"
within = "Engine.flush"         # only inside that definition; anywhere unless said
on = ["Bell", "bell"]           # only of these: the class, where it is defined, of `self` and in calls of the class;
                                # else the last name before the dot

[[identifier]]                  # both: fields of dataclasses, parameters that are also given by keyword
old = "bell"
new = "event"

[[keyword]]                     # arguments that are given by keyword, where they differ from the attribute of that name
old = "bell"
new = "bell"

[[string]]                      # whole string literals
old = "services.bell"
new = "services.event"

A `scope` at the top of the file is that of all tables without one. Tables may be written in a line each:
`identifier = [{ old = "bell", new = "event" }]`.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

KINDS = ("name", "attribute", "keyword", "identifier", "string")


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that renames one identifier or string literal."""

    kind: str
    old: str
    new: str
    scope: tuple[str, ...] = ()
    within: str = ""
    on: tuple[str, ...] = ()

    def applies(self, path: str, definition: str, owner: str) -> bool:
        """Whether the rule applies in a file, inside a definition given by its qualified name. `owner` is the object
        that has the attribute."""
        if self.on and owner not in self.on:
            return False
        if self.scope and not any(fnmatch(path, pattern) for pattern in self.scope):
            return False
        return not self.within or f"{definition}.".startswith(f"{self.within}.")


@dataclass(frozen=True)
class RenameMap:
    """All renames of one commit. Names of modules are dotted."""

    modules: dict[str, str] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()

    def renamed(self, kind: str, old: str, path: str, definition: str, owner: str = "") -> str:
        """Return the new name of an identifier; its old name if no rule applies."""
        for rule in self._by_old.get((kind, old), ()):
            if rule.applies(path, definition, owner):
                return rule.new
        return self.renamed("attribute", old, path, definition, owner) if kind == "keyword" else old

    def module(self, dotted: str) -> str:
        """Return the new dotted name of a module or of a name in it. The longest matching rule wins."""
        name, rest = dotted, ""
        while name:
            if name in self.modules:
                return self.modules[name] + rest
            name, _, last = name.rpartition(".")
            rest = f".{last}{rest}"
        return dotted

    @property
    def _by_old(self) -> dict[tuple[str, str], list[Rule]]:
        found: dict[tuple[str, str], list[Rule]] = self.__dict__.get("_index", {})
        if not found and self.rules:
            for rule in self.rules:
                found.setdefault((rule.kind, rule.old), []).append(rule)
            self.__dict__["_index"] = found
        return found


def load_map(path: Path) -> RenameMap:
    """Read a map. Raises ValueError for an unknown kind of table, and for a rule without an old or a new name."""
    tables = tomllib.loads(path.read_text())
    everywhere = tables.pop("scope", ())
    if unknown := set(tables) - {*KINDS, "module"}:
        raise ValueError(f"{path} has tables that are no kind of rename: {sorted(unknown)}")
    modules = {str(each["old"]): str(each["new"]) for each in tables.get("module", [])}
    rules = list[Rule]()
    for kind in KINDS:
        for each in tables.get(kind, []):
            if set(each) - {"old", "new", "scope", "within", "on"} or not (each.get("old") and each.get("new")):
                raise ValueError(f"{path}: [[{kind}]] {each} needs old and new, and knows scope, within and on")
            scope = tuple(each.get("scope", everywhere))
            kinds = ("name", "attribute") if kind == "identifier" else (kind,)
            within, on = each.get("within", ""), tuple(each.get("on", ()))
            if on and kind not in ("attribute", "keyword"):
                raise ValueError(f"{path}: [[{kind}]] {each} has an owner, which attributes alone have")
            rules.extend(Rule(one, each["old"], each["new"], scope, within, on) for one in kinds)
    return RenameMap(modules, tuple(rules))


def module_of(path: str) -> str:
    """Return the dotted name of a file's module."""
    parts = path.removesuffix(".py").split("/")
    if parts[0] == "services":
        parts = parts[2:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def path_of(path: str, renames: RenameMap) -> str:
    """Return the path of a file after the renames."""
    old = module_of(path)
    new = renames.module(old)
    if new == old or not path.endswith(".py"):
        return path
    end = "/__init__.py" if path.endswith("/__init__.py") else ".py"
    root = path[: -len(old.replace(".", "/") + end)]
    return root + new.replace(".", "/") + end
