"""What users and peers rely on, as data: the contracts that a renaming or a move of code must not change.

`python -m tests.contract.frozen_contracts` writes the files of tests/contract/frozen anew. A change of one of them is a
change that users see: it needs an entry in CHANGELOG.md.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodDescriptorType
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

import quire
from quire.v1 import common_pb2, inference_pb2, kvstore_pb2, scheduler_pb2, tokenizer_pb2, worker_pb2
from quire_common.config import ServiceConfig
from quire_router.front.http.open_paths import OPEN_PATHS
from quire_router.front.http.openapi.document import OPERATIONS, openapi_document

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent / "frozen"
_METRIC = re.compile("quire_(router|tokenizer|scheduler|worker|kvstore|grpc|build)_[a-z0-9_]+|quire_build_info")
SERVICES = ("router", "tokenizer", "scheduler", "worker", "kvstore")
_FILES: tuple[FileDescriptor, ...] = tuple(
    module.DESCRIPTOR for module in (common_pb2, inference_pb2, kvstore_pb2, scheduler_pb2, tokenizer_pb2, worker_pb2)
)


def wire() -> dict[str, Any]:
    """Messages with their fields, enums with their values, and RPCs, of all proto files."""
    found: dict[str, Any] = {}
    for file in _FILES:
        for enum in file.enum_types_by_name.values():
            found[enum.full_name] = {value.name: value.number for value in enum.values}
        for message in file.message_types_by_name.values():
            found.update(_messages(message))
        for service in file.services_by_name.values():
            found[service.full_name] = {
                method.name: [
                    "stream " * method.client_streaming + method.input_type.full_name,
                    "stream " * method.server_streaming + method.output_type.full_name,
                ]
                for method in service.methods
            }
    return found


def _messages(message: Descriptor) -> Iterator[tuple[str, Any]]:
    fields = {field.name: _field(field) for field in message.fields}
    yield message.full_name, fields
    for enum in message.enum_types:
        yield enum.full_name, {value.name: value.number for value in enum.values}
    for nested in message.nested_types:
        yield from _messages(nested)


def _field(field: FieldDescriptor) -> list[Any]:
    of = field.message_type or field.enum_type
    label = "repeated" if field.is_repeated else "optional" if field.has_presence else "one"
    return [field.number, label, of.full_name if of is not None else field.type]


def http() -> dict[str, Any]:
    """The OpenAPI document, texts left out: they are prose."""
    paths = frozenset(operation.path for operation in OPERATIONS)
    document: dict[str, Any] = _without_prose(openapi_document(OPEN_PATHS, paths))
    return document


def _without_prose(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _without_prose(member)
            for name, member in value.items()
            if not (name in ("description", "summary", "title") and isinstance(member, str))
        }
    return [_without_prose(item) for item in value] if isinstance(value, list) else value


def flags() -> dict[str, Any]:
    """By service: each option with its type, default, choices and bounds."""
    found: dict[str, Any] = {}
    for service in SERVICES:
        module = importlib.import_module(f"quire_{service}.config")
        config = next(
            each
            for each in vars(module).values()
            if inspect.isclass(each) and issubclass(each, ServiceConfig) and each is not ServiceConfig
        )
        found[service] = {
            field.name: [
                str(field.type),
                field.default,
                list(field.metadata.get("choices", ())),
                field.metadata.get("min"),
                field.metadata.get("max"),
                field.metadata.get("secret", False),
            ]
            for field in dataclasses.fields(config)
        }
    return found


def metrics() -> dict[str, list[str]]:
    """By name: the kinds by which the product's code makes it, and its labels where they stand beside the name."""
    found: dict[str, set[str]] = {}
    for node in _nodes(("services",)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _METRIC.fullmatch(node.value):
            found.setdefault(node.value, set())
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.args[0].value
            if isinstance(name, str) and _METRIC.fullmatch(name):
                kind = ast.unparse(node.func).rsplit(".", 1)[-1].lower().removesuffix("metricfamily")
                texts = (argument for argument in node.args if isinstance(argument, ast.Tuple | ast.List))
                labels = [str(each.value) for text in texts for each in text.elts if isinstance(each, ast.Constant)]
                found.setdefault(name, set()).add(" ".join([kind, *labels]))
    return {name: sorted(kinds) for name, kinds in found.items()}


def _nodes(folders: tuple[str, ...]) -> Iterator[ast.AST]:
    """Of all modules of the product."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "v1" not in path.parts:
                yield from ast.walk(ast.parse(path.read_text()))


def errors() -> list[str]:
    """Codes of typed errors: first arguments, in capitals, of what is raised or made in the product's code."""
    codes = set[str]()
    for node in _nodes(("services", "quire")):
        if isinstance(node, ast.Call) and len(node.args) >= 3 and isinstance(node.args[0], ast.Constant):
            code = node.args[0].value
            if isinstance(code, str) and code.isupper() and code.isidentifier():
                codes.add(code)
    return sorted(codes)


def python_api() -> dict[str, Any]:
    """What `import quire` offers: signatures of functions, and of public methods of classes."""
    found: dict[str, Any] = {}
    for name in sorted(quire.__all__):
        value = getattr(quire, name)
        if inspect.isclass(value):
            methods = {
                method: _signature(function)
                for method, function in inspect.getmembers(value, callable)
                if method == "__init__" or not (method.startswith("_") or isinstance(function, MethodDescriptorType))
            }
            found[name] = {method: text for method, text in methods.items() if text}
        elif callable(value):
            found[name] = _signature(value)
    return found


def _signature(function: Callable[..., Any]) -> str:
    try:
        return str(inspect.signature(function))
    except ValueError:  # of C
        return ""


CONTRACTS: dict[str, Callable[[], Any]] = {
    "wire": wire,
    "http": http,
    "flags": flags,
    "metrics": metrics,
    "errors": errors,
    "python_api": python_api,
}


def as_text(contract: Any) -> str:
    """As it is kept: one fact a line, so that a change is easy to read."""
    return json.dumps(contract, indent=1, sort_keys=True, ensure_ascii=False, default=str) + "\n"


def main() -> int:
    """Write all files."""
    FOLDER.mkdir(exist_ok=True)
    for name, contract in CONTRACTS.items():
        (FOLDER / f"{name}.json").write_text(as_text(contract()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
