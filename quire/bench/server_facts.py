"""The facts that a benchmark asks a server for before it measures: the model, the size of the vocabulary, and whether
it answers."""

from __future__ import annotations

import http.client
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.bench.datasets import BenchRequest
from quire.bench.load import PlannedRequest
from quire.bench.load_processes import run_load
from quire.bench.target import Target
from quire.errors import InvalidArgument, Unavailable

_POLL_S = 1.0
_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class ServerFacts:
    """`vocabulary` is 0 if its size is not known."""

    model: str
    vocabulary: int


def find_facts(base_url: str, headers: Mapping[str, str], timeout_s: float, *, insecure: bool = False) -> ServerFacts:
    """Return the first model that the server lists at /v1/models, and the size of its vocabulary (0 if the server does
    not tell it). No proxy is used, and a TLS certificate must be valid unless `insecure` is set. While there is no such
    answer (no connection, an HTTP error, no JSON of this form, no model), ask again every second for `timeout_s`.
    Raises Unavailable after that, and at once if the server refuses the API key or does not speak HTTP, such as a gRPC
    port."""
    deadline = time.monotonic() + timeout_s
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if insecure:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        handlers.append(urllib.request.HTTPSHandler(context=context))
    opener = urllib.request.build_opener(*handlers)
    while True:
        try:
            request = urllib.request.Request(f"{base_url}/v1/models", headers=dict(headers))
            with opener.open(request, timeout=_TIMEOUT_S) as answer:
                models: list[dict[str, Any]] = json.loads(answer.read())["data"]
            if models:
                return ServerFacts(models[0]["id"], int(models[0].get("vocab_size") or 0))
            cause = "it lists no model"
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                raise Unavailable("REFUSED", f"{base_url} wants an API key.", "Give --api-key.") from error
            cause = f"HTTP {error.code}"
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:  # also JSON of another shape
            cause = str(error)
        except http.client.BadStatusLine as error:
            raise Unavailable(
                "NOT_HTTP",
                f"The server at {base_url} does not speak HTTP.",
                "Give the HTTP port with --base-url; `quire status` shows it.",
            ) from error
        except http.client.HTTPException as error:  # such as a body that was cut
            cause = f"{type(error).__name__}: {error}"
        if time.monotonic() > deadline:
            raise Unavailable("NOT_READY", f"{base_url} does not answer: {cause}.", "Check --base-url.")
        time.sleep(_POLL_S)


def vocabulary_of(folder: str) -> int:
    """Return `vocab_size` of the config.json in a model's folder, or of its `text_config`. Raises InvalidArgument if
    there is none, or if it is not a finite number."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return int(config.get("vocab_size") or config["text_config"]["vocab_size"])
    except (OSError, ValueError, OverflowError, LookupError, TypeError, AttributeError) as error:
        raise InvalidArgument(
            "BAD_TOKENIZER", f"{folder} has no config.json with vocab_size.", "Give --random-vocab-size instead."
        ) from error


def wait_ready(target: Target, request: BenchRequest, timeout_s: float) -> None:
    """Send `request` to the target, and return when it was answered. While the server cannot be reached, drops the
    connection or answers 503, the request is repeated every second for `timeout_s`. Raises Unavailable after that, and
    at once for any other failure. One attempt has no time limit of its own: a server that takes the request and never
    answers is waited for without end."""
    deadline = time.monotonic() + timeout_s
    body = target.request(request.prompt, request.output_len, "bench-ready")
    while True:
        _, (outcome,) = run_load(target, [PlannedRequest(0, 0.0, body)])
        if outcome.ok:
            return
        waits = outcome.error.startswith(("no connection", "connection lost", "HTTP 503"))
        if not waits or time.monotonic() > deadline:
            raise Unavailable(
                "FIRST_REQUEST_FAILED", f"The first request failed: {outcome.error}", "Check the model and lengths."
            )
        time.sleep(_POLL_S)
