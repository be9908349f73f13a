from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.router.fake_router import FakeRouter, serve_fake_router


@pytest.fixture
def fake() -> Iterator[tuple[FakeRouter, str]]:
    with serve_fake_router() as served:
        yield served
