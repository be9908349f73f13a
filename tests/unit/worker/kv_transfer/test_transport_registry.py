"""The registry of transports: what derives from it, and that its entries lead to classes."""

from __future__ import annotations

import dataclasses
import importlib

import pytest

from quire_worker.config import WorkerConfig
from quire_worker.kv_transfer.transports import registry
from quire_worker.kv_transfer.transports.registry import TRANSPORTS, PeerSocket, Traffic, TransportEntry
from quire_worker.kv_transfer.wire import transport_code, transport_name


@pytest.mark.parametrize("entry", TRANSPORTS, ids=lambda entry: f"{entry.traffic.value}-{entry.name}")
def test_an_entry_names_a_class_of_its_name(entry: TransportEntry) -> None:
    found = getattr(importlib.import_module(f"{registry.__package__}.{entry.module}"), entry.class_name)
    methods = ("make", "offered", "fetch", "close", *(("probe", "send") if entry.traffic is Traffic.STORE else ()))
    assert found.name == entry.name and all(callable(getattr(found, method)) for method in methods)
    assert transport_name(transport_code(entry.name)) == entry.name
    assert bool(entry.sockets) == (entry.traffic is Traffic.PEER), "peers come in somewhere"


@pytest.mark.parametrize("traffic", Traffic)
def test_no_name_is_twice(traffic: Traffic) -> None:
    assert len(set(registry.names(traffic))) == len(registry.names(traffic)) > 0


@pytest.mark.parametrize(("field", "traffic"), [("kv_transport", Traffic.STORE), ("peer_transport", Traffic.PEER)])
def test_flags_take_what_is_registered(field: str, traffic: Traffic) -> None:
    (option,) = (each for each in dataclasses.fields(WorkerConfig) if each.name == field)
    assert option.metadata["choices"] == ("auto", *registry.names(traffic))


def test_auto_leaves_out_what_is_used_by_name_alone() -> None:
    automatic = [entry.name for entry in registry.entries(Traffic.PEER, "auto")]
    assert automatic == ["cuda_ipc", "shm", "tcp", "grpc"]
    assert [entry.name for entry in registry.entries(Traffic.PEER, "nixl")] == ["nixl"]
    assert registry.peer_sockets("auto") == frozenset(PeerSocket)
    assert registry.peer_sockets("shm") == {PeerSocket.UNIX}
    assert registry.missing_package("auto") == ""
