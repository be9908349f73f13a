"""A local stack has memory and a disk for KV pages with nothing to install; its successor finds what it kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import Client, SamplingParams
from quire.local.page_cache import pages_folder
from quire.local.spec import SERVICES, StackSpec
from quire.local.stack import LocalStack
from tests.pipeline.leftovers import assert_nothing_left
from tests.pipeline.page_tiers import PATIENT, wait_for_tiers
from tests.tiers import deep_after

PROMPT = "Friends, Romans, countrymen, lend me your ears; I come to bury Caesar, not to praise him.\n" * 8
FLAGS = {"worker": {"paced": "2"}, **PATIENT}


def ask(stack: LocalStack) -> tuple[list[int], set[str]]:
    """The answer, and the services that its timings name."""
    with Client(stack.grpc) as client:
        output = client.complete(PROMPT, SamplingParams(temperature=0.0, max_tokens=8), return_timings=True)
    return output.outputs[0].token_ids, {timing.service for timing in output.timings}


def start(model: Path, **fields: object) -> LocalStack:
    return LocalStack(StackSpec("pages", str(model), flags=FLAGS, **fields))  # type: ignore[arg-type]  # the spec's own fields


@pytest.mark.deep
@pytest.mark.parametrize("lasting", deep_after(1, [True, False]))
def test_kept_pages_serve_the_next_stack_of_that_name(demo_model: Path, *, lasting: bool) -> None:
    folder = pages_folder("pages", lasting=lasting)
    first = start(demo_model, keep_directory=lasting)
    tokens, _ = ask(first)
    kept = wait_for_tiers(first, lambda tiers: tiers["disk"].stored > 0)
    assert kept["disk"].capacity_bytes == 8 << 30 and kept["ram"].capacity_bytes == 1 << 30
    state = first.directory.read()
    first.close()
    assert state is not None
    assert_nothing_left(state)
    assert folder.exists() == lasting
    assert not lasting or folder.stat().st_mode & 0o077 == 0, "nobody else may look into them"
    second = start(demo_model, keep_directory=lasting)
    again, services = ask(second)
    assert again == tokens
    hits = wait_for_tiers(second, lambda tiers: not lasting or tiers["disk"].hits > 0)["disk"].hits
    assert bool(hits) == lasting
    assert not lasting or services == set(SERVICES)
    second.close()
