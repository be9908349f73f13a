"""What a client is told of the tokens that need not be computed: hits on the device and in the kvstore alike."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from quire.local.spec import StackSpec
from quire.local.stack import LocalStack
from tests.pipeline.page_tiers import PATIENT, wait_for_tiers

PROMPT = "Friends, Romans, countrymen, lend me your ears; I come to bury Caesar, not to praise him.\n" * 8
LIMIT_S = 60.0
PAGE = 16


def usage(stack: LocalStack, **more: Any) -> tuple[int, int]:
    """Prompt tokens, and those of them that a cache had."""
    state = stack.directory.read()
    assert state is not None
    body = json.dumps({"prompt": PROMPT, "max_tokens": 8, "temperature": 0, **more}).encode()
    request = urllib.request.Request(f"{state.http}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        told = json.load(answer)["usage"]
    return told["prompt_tokens"], told["prompt_tokens_details"]["cached_tokens"]


def test_usage_counts_cached_tokens_of_device_and_kvstore(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    flags = {"worker": {"paced": "2"}, **PATIENT}
    spec = StackSpec("usage", str(demo_model), flags=flags, keep_directory=True)
    first = LocalStack(spec)
    tokens, cached = usage(first)
    assert cached == 0
    whole_pages = (tokens - 1) // PAGE * PAGE
    assert usage(first) == (tokens, whole_pages), "on the device"
    assert usage(first, cache_salt="mine") == (tokens, 0), "a salt keeps them apart"
    assert usage(first, cache_salt="mine") == (tokens, whole_pages)
    wait_for_tiers(first, lambda tiers: tiers["disk"].stored >= 2 * whole_pages // PAGE)
    first.close()
    second = LocalStack(spec)
    assert usage(second) == (tokens, whole_pages), "in the kvstore, which had written them to its disk"
    second.close()
