"""Which addresses of tickets a worker dials."""

from __future__ import annotations

import pytest

from quire_common.credit import RankAddress
from quire_common.errors import ConfigError
from quire_worker.config import WorkerConfig
from quire_worker.kv_transfer.peers import peer_listeners
from quire_worker.kv_transfer.peers.peer_hosts import PeerHosts, peer_hosts
from quire_worker.kv_transfer.peers.peer_listeners import PeerListeners


def allows(entries: tuple[str, ...], address: str) -> bool:
    host, _, port = address.rpartition(":")
    return PeerHosts(entries).refusal(host, int(port)) is None


@pytest.mark.parametrize(
    ("entry", "dialled", "refused"),
    [
        ("10.0.0.7", ["10.0.0.7:1", "10.0.0.7:65535", "::ffff:10.0.0.7:1"], ["10.0.0.8:1", "10.0.0.70:1", "engine:1"]),
        ("10.0.0.7:7000", ["10.0.0.7:7000"], ["10.0.0.7:7001", "10.0.0.8:7000"]),
        ("10.1.0.0/16", ["10.1.2.3:1"], ["10.2.0.1:1", "169.254.169.254:80", "127.0.0.1:6379", "1.10.1.2:1"]),
        ("10.1.0.0/16:7000", ["10.1.2.3:7000"], ["10.1.2.3:6379"]),
        ("fd00::/8", ["fd00::7:1"], ["fe80::1:1", "10.0.0.7:1"]),
        ("[fd00::7]:7000", ["fd00::7:7000"], ["fd00::7:7001"]),
        (
            "engine.local",
            ["engine.local:1", "ENGINE.local:1"],
            ["xengine.local:1", "engine.local.evil:1", "127.0.0.1:1"],
        ),
        ("*.workers.svc:7000", ["a.workers.svc:7000"], ["workers.svc:7000", "aworkers.svc:7000", "a.workers.svc:80"]),
        # The system's resolver reads these as 127.0.0.1.
        ("10.0.0.0/8", [], ["127.1:1", "2130706433:1", "0x7f.1:1"]),
    ],
)
def test_only_listed_hosts_are_dialled(entry: str, dialled: list[str], refused: list[str]) -> None:
    assert [address for address in dialled if not allows((entry,), address)] == []
    assert [address for address in refused if allows((entry,), address)] == []
    assert all(allows(("192.0.2.1", entry), address) for address in dialled), "any entry is enough"


def test_a_refusal_names_the_address_and_the_option() -> None:
    error = PeerHosts(()).refusal("169.254.169.254", 80)
    assert error is not None and error.code == "PEER_NOT_ALLOWED"
    assert "169.254.169.254:80" in error.message and "--peer-hosts" in error.fix


@pytest.mark.parametrize(
    "entry",
    [
        "",
        "10.0.0.0/33",
        "10.0.0.1/8",
        "host:port",
        "host:70000",
        "10.0.0.0/8:65536",
        "[::1]:70000",
        "a b",
        "http://h",
        "*",
    ],
)
def test_an_entry_that_names_no_hosts_ends_the_start(entry: str) -> None:
    with pytest.raises(ConfigError, match="--peer-hosts") as caught:
        PeerListeners(WorkerConfig(peer_hosts=("10.0.0.1", entry), peer_listen="off"))
    assert (caught.value.code, caught.value.param) == ("BAD_VALUE", "peer_hosts")


def test_without_the_option_this_host_alone_is_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    local = peer_hosts(WorkerConfig(listen="127.0.0.1:7"), ())
    assert allows(local, "127.0.0.1:1") and allows(local, "127.0.0.2:1") and not allows(local, "10.0.0.7:1")
    own = (RankAddress(0, "tcp", b"10.0.0.7:41000"),)
    routed = peer_hosts(WorkerConfig(listen="0.0.0.0:7", advertise="engine.local:7", insecure=True), own)
    assert allows(routed, "10.0.0.7:1") and allows(routed, "engine.local:1")
    for elsewhere in ("10.0.0.8:1", "127.0.0.1:6379", "0.0.0.0:6379", ":::6379"):
        assert not allows(routed, elsewhere)
    monkeypatch.setattr(peer_listeners, "own_host", lambda family: "10.0.0.9")
    listeners = PeerListeners(WorkerConfig(listen="0.0.0.0:7", peer_transport="tcp", insecure=True))
    listeners.close()
    assert listeners.peer_hosts == ("10.0.0.9",)
    assert peer_hosts(WorkerConfig(peer_hosts=("10.0.0.8",)), own) == ("10.0.0.8",), "the option is the whole list"
