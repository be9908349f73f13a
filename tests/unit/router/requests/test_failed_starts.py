"""A request that fails as it starts gives its places back, and says nothing of how fast requests end."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from quire_common.errors import InvalidArgument
from quire_router.limits.concurrency import ConcurrencyLimits
from quire_router.principal import KeyLimits
from quire_router.requests.admission import Admission
from quire_router.requests.pipeline import Pipeline
from quire_router.sequences.job import Caller
from tests.unit.router.makers import make_job


class RefusingEncoder:
    async def bad_words(self, words: Any, context: Any) -> None:
        raise InvalidArgument("REFUSED", "m", "f")


async def test_a_request_that_fails_as_it_starts_does_not_shorten_retry_times() -> None:
    concurrency, admission = ConcurrencyLimits(), Admission(8)
    catalog: Any = SimpleNamespace(resolve=lambda *_: SimpleNamespace(name="m"))
    encoder: Any = RefusingEncoder()
    unused: Any = None
    pipeline = Pipeline(
        catalog,
        encoder,
        unused,
        unused,
        admission,
        concurrency,
        unused,
        unused,
        ticket_manager=unused,
        share_prefix_across_keys=False,
    )
    caller = Caller("r", tenant="t", limits=KeyLimits(max_concurrent=4))
    with pytest.raises(InvalidArgument):
        await pipeline.generate(replace(make_job(), bad_words=("a",)), caller, time.monotonic_ns())
    assert admission.inside == concurrency.places("t").held == 0
    assert admission._returned.time_for_s(1) == concurrency.places("t").returned.time_for_s(1) == 0.0
    async with pipeline.admitted(caller, 2):
        pass
    assert admission._returned.time_for_s(1) > 0.0 < concurrency.places("t").returned.time_for_s(1)
