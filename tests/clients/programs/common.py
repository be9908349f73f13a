"""What the programs share. They run in environments of their own, with nothing of Quire's but this folder."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Callable

URL, KEY, MODEL = (os.environ[name] for name in ("CLIENT_URL", "CLIENT_KEY", "CLIENT_MODEL"))
PROMPT = "ROMEO:\nBut, soft! what light through "
MESSAGES = [{"role": "user", "content": "Speak of love."}]


def in_flight() -> int:
    """Sequences that the router runs now."""
    request = urllib.request.Request(f"{URL}/load", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return int(json.load(answer)["server_load"])


def wait_idle(limit_s: float = 60.0) -> None:
    """What nobody reads any more has ended."""
    deadline = time.monotonic() + limit_s
    while in_flight():
        assert time.monotonic() < deadline, "the abandoned request still runs"
        time.sleep(0.05)


def fails(error: type[BaseException], call: Callable[[], object], *texts: str) -> BaseException:
    """The call raises the error, and its message has the texts."""
    try:
        call()
    except error as caught:
        for text in texts:
            assert text in str(caught), (text, str(caught))
        return caught
    raise AssertionError(f"no {error.__name__}")


def run(*checks: Callable[[], None]) -> None:
    """Each by its name, so that a failure says which."""
    for check in checks:
        check()
        print(f"ok {check.__name__}", flush=True)
