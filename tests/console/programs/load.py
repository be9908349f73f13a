"""Requests of several tenants, so that the console has something to show. Runs beside the browser, with the standard
library alone."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
from collections.abc import Mapping
from urllib.parse import urlsplit

PROMPTS = (
    "ROMEO:\nBut, soft! what light",
    "KING HENRY:\nOnce more unto",
    "First Citizen:\nBefore we proceed",
    "HAMLET:\n",
)
# Long enough for pages that a later request finds.
_REPEATED = 12


class Load:
    """A context: so many streams of each tenant run until it ends."""

    def __init__(
        self, url: str, keys: Mapping[str, str], streams: Mapping[str, int], max_tokens: int, prefix: str = ""
    ) -> None:
        """`prefix`: what the ids of requests begin with; empty: the router makes them."""
        self._prefix = prefix
        self._address = urlsplit(url)
        self._max_tokens = max_tokens
        self._over = threading.Event()
        # The router's errors, one for each request that it ended with one.
        self.errors: list[str] = []
        self._numbers = itertools.count()
        self._threads = [
            threading.Thread(target=self._run, args=(keys[name],), daemon=True)
            for name, count in streams.items()
            for _ in range(count)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, key: str) -> None:
        """Send one request after the other."""
        while not self._over.is_set():
            try:
                self._stream(key)
            except (OSError, http.client.HTTPException) as error:
                self.errors.append(repr(error))
                self._over.wait(1.0)

    def _stream(self, key: str) -> None:
        number = next(self._numbers)
        body = {
            "prompt": f"{PROMPTS[number % len(PROMPTS)]}\n" * _REPEATED,
            "stream": True,
            "max_tokens": self._max_tokens,
            "ignore_eos": True,
            "seed": number,
        }
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        if self._prefix:
            headers["X-Request-Id"] = f"{self._prefix}{number}"
        connection = http.client.HTTPConnection(str(self._address.hostname), int(self._address.port or 80), timeout=120)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            while line := answer.readline():
                if self._over.is_set():
                    return
                if b'"error"' in line:
                    self.errors.append(line.decode())
        finally:
            connection.close()
