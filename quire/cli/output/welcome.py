"""The message of a stack that is ready: its addresses, and a command line to try."""

from __future__ import annotations

import json
import shlex
import urllib.parse
from typing import Any

from quire.cli.output.terminal import paint
from quire.local.events import Ready
from quire.local.readiness import http_get
from quire.local.spec import StackSpec
from quire.models import is_conversational


def print_welcome(spec: StackSpec, ready: Ready) -> None:
    """Ask the stack for the name of its model. Then print this name (the model's path if no name is known), the
    addresses of the stack, and a curl command that sends it a request. An API key is not shown."""
    http = ready.http
    key = spec.api_keys[0] if spec.api_keys else None
    name = _served_name(http, key) or spec.model
    path, asked = _example(spec.model)
    body = json.dumps({"model": name, **asked, "temperature": 0, "max_tokens": 40})
    headers = ["-H", "Content-Type: application/json"]
    if key is not None:
        # The key itself is the user's to know, and to keep off the screen.
        headers += ["-H", "Authorization: Bearer KEY"]
    insecure = ["-k"] if http.startswith("https") else []
    curl = shlex.join(["curl", "-s", *insecure, f"{http}{path}", *headers, "-d", body])
    print(f"\nQuire serves {paint(name, 'bold')} after {ready.seconds:.1f} s:\n")
    print(f"  HTTP  {paint(http, 'cyan')}\n  gRPC  {ready.grpc}\n\nTry it:\n\n  {curl}\n", flush=True)


def _served_name(http: str, key: str | None) -> str:
    """Return the name of the first model that the router lists; empty if it lists none or does not answer."""
    url = urllib.parse.urlsplit(http)
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
    body = http_get(url.hostname or "", url.port or 0, "/v1/models", tls=url.scheme == "https", headers=headers)
    models = json.loads(body)["data"] if body else []
    return str(models[0]["id"]) if models else ""


def _example(model: str) -> tuple[str, dict[str, Any]]:
    """Return a path and a body of a request that suit the model: a chat question if it is conversational, else a text
    to continue."""
    if is_conversational(model):
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    return "/v1/completions", {"prompt": "ROMEO:\nBut soft,"}
