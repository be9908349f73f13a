"""The shown configuration of the router contains no secrets."""

from __future__ import annotations

from quire_common.config import describe, explain_config
from quire_router.config import RouterConfig


def test_redis_password_is_masked_in_the_shown_configuration() -> None:
    url = "redis://:hunter2@host/0"
    explained = explain_config(RouterConfig, "router", [f"--redis={url}", f"--discovery={url}"], {})
    assert "hunter2" not in str(explained)
    assert {one["name"]: one["value"] for one in explained}["redis"] == "***"
    assert "hunter2" not in str(describe(RouterConfig(redis=url, discovery=url)))
