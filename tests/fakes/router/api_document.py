"""Holds answers of the router to its own OpenAPI document: every JSON answer of a rig, and events where asked."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import httpx
import jsonschema

from quire_router.front.http.open_paths import OPEN_PATHS
from quire_router.front.http.openapi.document import OPERATIONS, openapi_document

DOCUMENT = openapi_document(OPEN_PATHS, frozenset(operation.path for operation in OPERATIONS))


@functools.cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    """Of a schema of the document by its name."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    return jsonschema.Draft202012Validator(schema)


@functools.cache
def path_of(path: str) -> str | None:
    """The document's path for a request's."""
    if path in DOCUMENT["paths"]:
        return path
    for template in DOCUMENT["paths"]:
        pattern = re.sub(r"\\{model\\}", ".+", re.escape(template))
        if re.fullmatch(re.sub(r"\\{\w+\\}", "[^/]+", pattern), path):
            return str(template)
    return None


def schema_of(method: str, path: str, status: int, content_type: str) -> str:
    """The name of what an answer must be; an error's for what the document does not know."""
    operation = DOCUMENT["paths"].get(path_of(path), {}).get(method.lower())
    if operation is None:
        return "AnthropicError" if path.startswith("/v1/messages") and path_of(path) else "Error"
    answer = operation["responses"].get(str(status), operation["responses"]["default"])
    return str(answer["content"][content_type]["schema"]["$ref"]).rpartition("/")[2]


async def check_answer(response: httpx.Response) -> None:
    """An httpx hook. Streams are left alone, since reading one here would wait for its end."""
    kind = response.headers.get("content-type", "").partition(";")[0]
    request = response.request
    if kind == "application/json" and request.method != "HEAD":
        await response.aread()
        validator(schema_of(request.method, request.url.path, response.status_code, kind)).validate(response.json())


def check_request(path: str, body: Any) -> None:
    """A body that the router took must be one that the document allows."""
    schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    validator(schema.rpartition("/")[2]).validate(body)


def check_events(path: str, text: str) -> list[Any]:
    """Every event of a whole stream; returns their data."""
    found = []
    for frame in text.removesuffix("\n\n").split("\n\n"):
        data = frame.rpartition("data: ")[2]
        if data == "[DONE]":
            continue
        event = json.loads(data)
        name = "Error" if "error" in event and "type" not in event and "choices" not in event else None
        validator(name or schema_of("POST", path, 200, "text/event-stream")).validate(event)
        found.append(event)
    return found
