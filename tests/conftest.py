"""What holds for all tests: property tests are not judged by how fast a busy machine draws their inputs, and stacks
keep their pages away from the developer's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("quire", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("quire")


@pytest.fixture(scope="session", autouse=True)
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
