"""A local stack has memory and a disk for KV pages with nothing to install; its successor finds what it kept."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire import Client, SamplingParams
from quire.local.page_cache import pages_folder
from quire.local.spec import StackSpec
from quire.local.stack import LocalStack
from quire.v1 import kvstore_pb2, kvstore_pb2_grpc
from tests.pipeline.leftovers import assert_nothing_left

PROMPT = "Friends, Romans, countrymen, lend me your ears; I come to bury Caesar, not to praise him.\n" * 8
LIMIT_S = 60.0
PACED = {"worker": {"paced": "2"}}


def at_rest(stack: LocalStack) -> dict[str, Any] | None:
    """Tiers by name; None while a lease or a put is open."""
    state = stack.directory.read()
    assert state is not None
    with grpc.insecure_channel(f"127.0.0.1:{state.services['kvstore'].port}") as channel:
        stats = kvstore_pb2_grpc.KvStoreStub(channel).Stats(kvstore_pb2.StatsRequest(), timeout=LIMIT_S)
    return None if stats.leases or stats.pending_puts else {tier.medium: tier for tier in stats.tiers}


def ask(stack: LocalStack) -> list[int]:
    with Client(stack.grpc) as client:
        deltas = client.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=8), return_token_ids=True)
        return [token for delta in deltas for token in delta.token_ids]


def wait_until(stack: LocalStack, condition: Any) -> dict[str, Any]:
    deadline = time.monotonic() + LIMIT_S
    while not ((found := at_rest(stack)) and condition(found)):
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def start(model: Path, **fields: object) -> LocalStack:
    return LocalStack(StackSpec("pages", str(model), flags=PACED, **fields))  # type: ignore[arg-type]  # the spec's own fields


@pytest.mark.parametrize("lasting", [True, False])
def test_what_one_stack_kept_the_next_one_of_its_name_finds(demo_model: Path, *, lasting: bool) -> None:
    folder = pages_folder("pages", lasting=lasting)
    first = start(demo_model, keep_directory=lasting)
    tokens = ask(first)
    kept = wait_until(first, lambda found: found["disk"].stored > 0)
    assert kept["disk"].capacity_bytes == 8 << 30 and kept["ram"].capacity_bytes == 1 << 30
    state = first.directory.read()
    first.close()
    assert state is not None
    assert_nothing_left(state)
    assert folder.exists() == lasting
    assert not lasting or folder.stat().st_mode & 0o077 == 0, "nobody else may look into them"
    second = start(demo_model, keep_directory=lasting)
    assert ask(second) == tokens
    hits = wait_until(second, lambda found: not lasting or found["disk"].hits)["disk"].hits
    assert bool(hits) == lasting
    second.close()
