"""Every number that an operator can set has bounds, so that none is too large for a timer, a column or a message."""

from __future__ import annotations

import argparse
import dataclasses
import math
import typing

import pytest

from quire_common import config
from quire_common.config import ServiceConfig, bounds_of, load_config
from quire_common.discovery.redis_discovery import RedisSettings
from quire_common.errors import ConfigError
from quire_kvstore.config import KvstoreConfig
from quire_router.config import RouterConfig
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.service.kv_events.events_config import parse_kv_events_config
from quire_tokenizer.config import TokenizerConfig
from quire_worker.config import WorkerConfig
from quire_worker.engine.run.session import HEARTBEAT_S

SERVICES: dict[str, type[ServiceConfig]] = {
    "kvstore": KvstoreConfig,
    "router": RouterConfig,
    "scheduler": SchedulerConfig,
    "tokenizer": TokenizerConfig,
    "worker": WorkerConfig,
}


def numbers(service: str) -> list[tuple[dataclasses.Field[typing.Any], type]]:
    hints = typing.get_type_hints(SERVICES[service])
    kinds = [
        (field, {hints[field.name], *typing.get_args(hints[field.name])})
        for field in dataclasses.fields(SERVICES[service])
    ]
    return [(field, float if float in kind else int) for field, kind in kinds if kind & {int, float}]


@pytest.mark.parametrize("service", SERVICES)
def test_every_number_is_bounded_on_both_sides(service: str) -> None:
    for field, kind in numbers(service):
        low, high = bounds_of(field, kind)
        assert low is not None and high is not None and low <= field_default(field) <= high < math.inf, field.name


def field_default(field: dataclasses.Field[typing.Any]) -> float:
    default: typing.Any = field.default
    return 0 if default is None else float(default)


@pytest.fixture
def kept_parsers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test makes the parser of a service once, because to make it takes longer than to parse a flag."""
    make, made = config._parser, dict[str, argparse.ArgumentParser]()

    def keep(cls: type, service: str, *rest: typing.Any) -> argparse.ArgumentParser:
        if service not in made:
            made[service] = make(cls, service, *rest)
        return made[service]

    monkeypatch.setattr(config, "_parser", keep)


@pytest.mark.usefixtures("kept_parsers")
@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e400", "-1e9", "1" + "0" * 30, "-2"])
def test_a_number_that_nothing_holds_is_refused_by_name(service: str, text: str) -> None:
    for field, kind in numbers(service):
        if kind is float and text == "1" + "0" * 30 and not field.name.endswith("_s"):
            continue
        flag = "--" + field.name.replace("_", "-")
        with pytest.raises(ConfigError, match=flag):
            load_config(SERVICES[service], service, [f"{flag}={text}"], {})


def test_a_whole_number_in_a_file_may_be_too_long_for_a_float(tmp_path: typing.Any) -> None:
    path = tmp_path / "quire.yaml"
    path.write_text("drain_timeout_s: 1" + "0" * 400)
    with pytest.raises(ConfigError, match="drain_timeout_s"):
        load_config(RouterConfig, "router", ["--config", str(path)], {})


def test_a_worker_gives_two_signs_of_life_in_the_shortest_silence_that_counts() -> None:
    (field,) = (field for field in dataclasses.fields(SchedulerConfig) if field.name == "worker_heartbeat_s")
    low, _ = bounds_of(field, float)
    assert low is not None and low >= 2 * HEARTBEAT_S


@pytest.mark.parametrize("query", ["ttl_s=inf", "poll_s=inf", "ttl_s=1e20", "poll_s=nan"])
def test_discovery_renews_within_a_day(query: str) -> None:
    with pytest.raises(ConfigError, match="ttl_s"):
        RedisSettings.parse(f"redis://host:6379/0?{query}")


@pytest.mark.parametrize("host", ["", "[::1", "[host]"])
def test_discovery_refuses_a_redis_without_a_valid_host(host: str) -> None:
    with pytest.raises(ConfigError, match="no valid host"):
        RedisSettings.parse(f"redis://{host}")


@pytest.mark.parametrize("name", ["buffer_steps", "hwm", "max_queue_size"])
def test_queues_of_events_have_lengths_that_zeromq_can_count(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        parse_kv_events_config(f'{{"{name}": {2**31}}}')
