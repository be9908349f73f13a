"""Static, DNS and membership: discovery without a server."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import pytest

from quire_common.discovery import Endpoint, make_discovery
from quire_common.discovery.dns_discovery import DnsDiscovery
from quire_common.discovery.membership import Membership
from quire_common.discovery.redis_client import open_redis
from quire_common.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

A, B = (Endpoint(name, "worker", f"127.0.0.1:{port}") for name, port in (("a", 1), ("b", 2)))


async def take(watch: AsyncIterator[list[Endpoint]]) -> list[Endpoint]:
    async with asyncio.timeout(30):
        return await anext(watch)


async def test_static_lists_once_and_ends_with_close() -> None:
    discovery = make_discovery("static", {"worker": ["127.0.0.1:2", "a=127.0.0.1:1"]})
    watch = discovery.watch("worker")
    assert await take(watch) == [Endpoint("127.0.0.1:2", "worker", "127.0.0.1:2"), A]
    more = asyncio.ensure_future(take(watch))
    await discovery.register(B)
    await asyncio.sleep(0)
    assert not more.done()
    await discovery.close()
    with pytest.raises(StopAsyncIteration):
        await more


async def test_static_knows_nothing_of_other_services() -> None:
    assert await take(make_discovery("static", {}).watch("kvstore")) == []


@pytest.mark.parametrize(
    ("spec", "static", "cause"),
    [
        ("etcd://x", {}, "etcd"),
        ("", {}, "Unknown discovery"),
        ("static", {"worker": ["nonsense"]}, "nonsense"),
        ("dns", {"worker": ["worker:port"]}, "worker:port"),
        ("dns", {"worker": [f"{'w' * 64}.cluster:70"]}, "no DNS name"),
        ("dns", {"worker": ["worker..cluster:70"]}, "worker..cluster:70"),
        ("redis://host:99999/0", {}, "bad port"),
        ("redis://host:1/0?ttl_s=x", {}, "ttl_s"),
        ("redis:///0", {}, "discovery"),
        ("static:worker:70", {}, "takes no address"),
        ("dns://worker:70", {}, "takes no address"),
    ],
)
def test_bad_settings_are_named(spec: str, static: dict[str, list[str]], cause: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_discovery(spec, static)
    assert cause in caught.value.message
    assert caught.value.fix


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:hunter2@host:99999/0",
        "redis://hunter2:pa/ss@host",
        "redis://user/hunter2@host",
        "redis://hunter2:12#x@host",
        "redis://hunter2:12?x@host",
        "redis://user:?hunter2@host",
        "redis://hunter2:12/0@host?ttl_s=x",
        "redis://user:hunter2\u2100@host",
    ],
)
def test_a_bad_url_does_not_show_its_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_discovery(url, {})
    assert "hunter2" not in str(caught.value)
    if not url.endswith(":99999/0"):  # the client checks no range of ports
        with pytest.raises(ConfigError) as caught:
            open_redis(url)
        assert "hunter2" not in str(caught.value) and caught.value.__context__ is None


async def test_dns_follows_changes_and_keeps_what_it_knew(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[list[str] | OSError] = [["10.0.0.2", "10.0.0.1"], socket.gaierror("no such name"), ["10.0.0.3"]]

    async def getaddrinfo(host: str, port: int, **kwargs: Any) -> list[Any]:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, OSError):
            raise answer
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in answer]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    discovery = DnsDiscovery({"worker": ["workers:70"]}, poll_s=0.01)
    watch = discovery.watch("worker")
    first = await take(watch)
    assert [endpoint.address for endpoint in first] == ["10.0.0.1:70", "10.0.0.2:70"]
    assert first[0].metadata == {"host": "workers"}
    assert [endpoint.address for endpoint in await take(watch)] == ["10.0.0.3:70"], "the failure showed nothing"
    await discovery.close()
    with pytest.raises(StopAsyncIteration):
        await take(watch)


async def test_dns_lists_two_ports_of_one_name() -> None:
    discovery = DnsDiscovery({"worker": ["127.0.0.1:70", "127.0.0.1:71"]})
    found = await take(discovery.watch("worker"))
    assert [endpoint.address for endpoint in found] == ["127.0.0.1:70", "127.0.0.1:71"]
    await discovery.close()


async def test_dns_resolves_real_names() -> None:
    discovery = make_discovery("dns", {"worker": ["localhost:70"]})
    assert "127.0.0.1:70" in [endpoint.address for endpoint in await take(discovery.watch("worker"))]
    await discovery.close()


def test_membership_shows_changes_alone() -> None:
    members = Membership(hold_s=10)
    members.update({}, "life", 0)
    assert members.members_if_changed() == []
    assert members.members_if_changed() is None
    members.update({"b": B, "a": A}, "life", 1)
    assert members.members_if_changed() == [A, B]
    members.update({"b": B}, "life", 2)
    assert members.members_if_changed() == [B]


def test_membership_keeps_everybody_until_a_source_is_trusted_again() -> None:
    members = Membership(hold_s=10)
    members.update({"a": A, "b": B}, "life", 0)
    assert members.members_if_changed() == [A, B]
    members.outage()
    assert members.members_if_changed() is None
    members.update({}, "life", 100)
    assert members.members_if_changed() is None, "just back: who is missing may not have reported yet"
    members.update({"a": A}, "life", 105)
    assert members.members_if_changed() is None
    members.update({"a": A}, "life", 111)
    assert members.members_if_changed() == [A]


def test_membership_notices_a_source_that_lost_its_memory() -> None:
    members = Membership(hold_s=10)
    members.update({"a": A, "b": B}, "life", 0)
    members.members_if_changed()
    members.update({}, None, 1)
    assert members.members_if_changed() is None, "emptied between two polls"
    members.update({"a": A}, "another", 3)
    assert members.members_if_changed() is None
    members.update({"a": A}, "another", 14)
    assert members.members_if_changed() == [A]
