"""The table of options against the services' own configurations, which the package itself must not import."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest

from quire.engine_options import ENGINE_OPTIONS, OPTION_NAMES, stack_flags
from quire.errors import InvalidArgument, Unsupported
from quire.local.spec import SERVICES, StackSpec


def fields_of(service: str) -> set[str]:
    config = getattr(importlib.import_module(f"quire_{service}.config"), f"{service.capitalize()}Config")
    return {field.name.replace("_", "-") for field in dataclasses.fields(config)}


@pytest.mark.parametrize("service", SERVICES)
def test_every_flag_is_one_that_its_service_knows(service: str) -> None:
    given = {own for option in ENGINE_OPTIONS for taker, own in option.takers if taker == service}
    ports = dict.fromkeys((*SERVICES, "http"), 1)
    wired = {flag[2:].partition("=")[0] for flag in StackSpec("n", "m").command(service, ports)[3:]}
    assert given | wired <= fields_of(service)


def test_names_are_unique_and_served_or_not() -> None:
    assert len(set(OPTION_NAMES)) == len(OPTION_NAMES)


def test_flags_by_service() -> None:
    flags = stack_flags({"max_num_batched_tokens": 128, "served-model-name": ["a", "b"], "dtype": None})
    tokens = {"max-num-batched-tokens": "128"}
    assert flags == {"scheduler": tokens, "worker": tokens, "router": {"served-model-name": "a,b"}}


def test_a_switch_has_no_value() -> None:
    flags = stack_flags({"lockstep": True})
    assert flags == {"worker": {"lockstep": True}, "scheduler": {"lockstep": True}}
    ports = dict.fromkeys((*SERVICES, "http"), 1)
    assert StackSpec("n", "m", flags=flags).command("worker", ports)[-1] == "--lockstep"
    assert stack_flags({"share_prefix_across_keys": True}) == {"router": {"share-prefix-across-keys": True}}
    flags = stack_flags({"lockstep": False})
    assert StackSpec("n", "m", flags=flags).command("scheduler", ports)[-1] == "--no-lockstep"


def test_the_public_port_is_governed_from_here() -> None:
    options = {"api_key_file": "keys.yaml", "requests_per_minute": 60, "allowed_origins": ["http://a", "http://b"]}
    flags = stack_flags({**options, "allow_credentials": True, "trust_request_chat_template": True})
    command = StackSpec("n", "m", flags=flags).command("router", dict.fromkeys((*SERVICES, "http"), 1))
    wanted = {"--api-key-file=keys.yaml", "--requests-per-minute=60", "--allowed-origins=http://a,http://b"}
    assert {*wanted, "--allow-credentials"} <= set(command)
    assert flags["tokenizer"] == {"allow-request-chat-template": True}


def test_the_routers_redis_is_on_no_command_line() -> None:
    url = "redis://:secret@host/0"
    spec = StackSpec("n", "m", flags=stack_flags({"redis": url}))
    assert not any("secret" in part for part in spec.command("router", dict.fromkeys((*SERVICES, "http"), 1)))
    assert spec.environment("router")["QUIRE_ROUTER_REDIS"] == url
    assert "QUIRE_ROUTER_REDIS" not in spec.environment("kvstore")


@pytest.mark.parametrize(("value", "flags"), [("int8", {"worker": {"quantize": "int8"}}), ("gguf", {}), (None, {})])
def test_quantization_int8_quantizes_at_load(value: str | None, flags: dict[str, Any]) -> None:
    assert stack_flags({"quantization": value}) == flags


def test_what_is_not_served_is_refused() -> None:
    with pytest.raises(Unsupported, match="quantization fp8 is not supported: quantized weights"):
        stack_flags({"quantization": "fp8"})
    with pytest.raises(InvalidArgument, match="lockstep is 'yes'"):
        stack_flags({"lockstep": "yes"})
    with pytest.raises(InvalidArgument, match="Did you mean max_num_seqs"):
        stack_flags({"max_num_seq": 3})
