"""Pages that go over gRPC between workers with certificates: to workers of the same authority, and to nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.certificates import Authority, TlsFiles
from tests.fakes.kv_transfer.peer_pulls import PAGES, TARGETS, failed, port_of, through
from tests.fakes.kv_transfer.peer_rig import NO_TLS, PAGE_BYTES, content, peer_rig
from tests.tcp_relay import TcpRelay
from tests.tiers import deep_after

SAID = content(PAGES[0])[:256]


class Eavesdropper(TcpRelay):
    """A relay that keeps what is answered."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.answered = bytearray()
        super().__init__(target)

    def _harm(self, data: bytes) -> bytes:
        self.answered += data
        return data


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.mark.parametrize("secured", [True, False])
def test_pages_go_to_peers_of_the_same_authority_and_nobody_can_read_them(authority: Authority, secured: bool) -> None:
    here_tls, there_tls = (authority.files(name, "worker") if secured else NO_TLS for name in ("here", "there"))
    with peer_rig() as rig:
        here, there = (rig.side(transport="grpc", tls=tls) for tls in (here_tls, there_tls))
        with Eavesdropper(("127.0.0.1", port_of(here, "grpc"))) as relay:
            here.export(1, *PAGES)
            there.pull(1, through(relay, "grpc"), PAGES, TARGETS)
            rig.until(lambda: 1 in there.told and 1 in here.told)
            assert there.told[1].ok and here.told[1].ok
            assert [there.pool.pages[page] for page in TARGETS] == [content(page) for page in PAGES]
            assert len(relay.answered) > len(PAGES) * PAGE_BYTES and (SAID in relay.answered) is not secured
        rig.assert_nothing_left()


@pytest.mark.parametrize(
    "who",
    deep_after(2, ["no certificate", "another service's", "another authority's", "no TLS", "trusts another authority"]),
)
def test_others_get_no_page_and_hold_up_nobody(authority: Authority, tmp_path: Path, who: str) -> None:
    stranger, friend = (
        Authority(tmp_path, "stranger").files("stranger's", "worker"),
        authority.files("friend", "worker"),
    )
    tls = {
        "no TLS": NO_TLS,
        "no certificate": TlsFiles("", "", authority.ca),
        "another service's": authority.files("kvstore", "kvstore"),
        "another authority's": stranger._replace(ca=authority.ca),
        "trusts another authority": friend._replace(ca=stranger.ca),
    }[who]
    with peer_rig() as rig:
        here = rig.side(transport="grpc", tls=authority.files("here", "worker"))
        other, there = rig.side(transport="grpc", tls=tls), rig.side(transport="grpc", tls=friend)
        here.export(1, *PAGES)
        other.pull(1, here.sources, PAGES, TARGETS)
        rig.until(lambda: 1 in other.told)
        failed(other, 0)
        assert here.told == {}, "the lease stands"
        there.pull(1, here.sources, PAGES, TARGETS)
        rig.until(lambda: 1 in there.told and 1 in here.told)
        assert there.told[1].ok and here.told[1].ok


@pytest.mark.deep
def test_a_certificate_that_cannot_be_read_leaves_the_other_ways(authority: Authority) -> None:
    broken = authority.files("here", "worker")._replace(cert="/nothing/here.pem")
    with peer_rig() as rig:
        here, there = rig.side(tls=broken), rig.side(tls=authority.files("there", "worker"))
        here.export(1, *PAGES)
        there.pull(1, here.sources, PAGES, TARGETS)
        rig.until(lambda: 1 in there.told and 1 in here.told)
        assert there.told[1].ok and here.told[1].ok
