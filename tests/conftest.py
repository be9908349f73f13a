"""What holds for all tests: property tests are not judged by how fast a busy machine draws their inputs."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("quire", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("quire")
