"""The cases of `make structured`: 300 schemas, 100 regular expressions and grammars, in the order of their lists."""

from __future__ import annotations

import json
import os
import re
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FETCHED = Path(os.environ.get("QUIRE_STRUCTURED", HERE.parents[1] / "build" / "structured"))
# Names of types that are Python's, or nobody's.
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "String": "string", "any": None, "Any": None}


@dataclass(frozen=True)
class Case:
    """`schema` is None for what is no schema."""

    name: str
    kind: str
    text: str
    schema: Any = None


def schemas() -> list[Case]:
    """Ours, then those of others."""
    ours: Mapping[str, Any] = json.loads((HERE / "schemas.json").read_text())
    others: list[str] = json.loads((HERE / "others.json").read_text())
    found = [*ours.items(), *((name, _other(name)) for name in others)]
    return [Case(name, "json_schema", json.dumps(schema), schema) for name, schema in found]


def patterns() -> list[Case]:
    """Regular expressions, then grammars."""
    listed = json.loads((HERE / "patterns.json").read_text())
    return [Case(f"{each['kind']} {at}", each["kind"], each["text"]) for at, each in enumerate(listed)]


def _other(name: str) -> Any:
    source, _, rest = name.partition(":")
    return {"bfcl": _function, "check-jsonschema": _vendor, "suite": _of_suite}[source](rest)


def _function(rest: str) -> Any:
    """The parameters of the first function of a question, as JSON Schema."""
    name, _, wanted = rest.partition(":")
    lines = map(json.loads, _wheel("bfcl_eval").read(f"bfcl_eval/data/BFCL_v4_{name}.json").decode().splitlines())
    return _mapped(next(each for each in lines if each["id"] == wanted)["function"][0]["parameters"])


def _mapped(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_mapped(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: value if key in ("enum", "default") else _mapped(value) for key, value in schema.items()}
    kind = found.get("type")
    if isinstance(kind, str) and kind in _TYPES:
        found.pop("type")
        found |= {"type": _TYPES[kind]} if _TYPES[kind] else {}
    return found


def _vendor(rest: str) -> Any:
    """A schema, or one of its definitions as a schema of its own."""
    path, _, definition = rest.partition("#")
    whole = json.loads(_wheel("check_jsonschema").read(f"check_jsonschema/builtin_schemas/{path}"))
    if not definition:
        return whole
    folder = definition.partition("/")[0]
    return {"$ref": f"#/{definition}", folder: whole[folder]}


def _of_suite(rest: str) -> Any:
    name, _, number = rest.partition(":")
    return _suite()[name][int(number)]["schema"]


@cache
def _wheel(package: str) -> zipfile.ZipFile:
    return zipfile.ZipFile(next(FETCHED.glob(f"{package}-*.whl")))


@cache
def _suite() -> dict[str, Any]:
    found = {}
    with tarfile.open(next(FETCHED.glob("jsonschema-*.tar.gz"))) as archive:
        for member in archive.getmembers():
            name = re.search(r"json/tests/draft2020-12/([\w-]+)\.json$", member.name)
            file = archive.extractfile(member) if name else None
            if name is not None and file is not None:
                found[name[1]] = json.load(file)
    return found
