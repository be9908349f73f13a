"""A partition of a private network: members on two sides that hear nothing of each other, and do not know it.

Packets are dropped in silence at the switch, by nftables, or, where that is not installed, by the bridge itself.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from quire.local.private_network import PrivateNetwork

_TABLE = "quire_cut"


@contextmanager
def partition(network: PrivateNetwork, ones: Sequence[str], others: Sequence[str]) -> Iterator[None]:
    """While it lasts; connections that were open stay so, and go on where they can when it is over."""
    nft = shutil.which("nft") or shutil.which("nft", path="/usr/sbin:/sbin")
    if nft is None:
        with _isolated(network, [*ones, *others]):
            yield
        return
    near, far = ("{" + ", ".join(network.hosts[name] for name in side) + "}" for side in (ones, others))
    rules = "\n".join(f"ip saddr {a} ip daddr {b} drop" for a, b in ((near, far), (far, near)))
    chain = f"chain forward {{ type filter hook forward priority 0;\n{rules}\n}}"
    network.at_switch(nft, "-f", "-", text=f"table bridge {_TABLE} {{\n{chain}\n}}")
    try:
        yield
    finally:
        network.at_switch(nft, "delete", "table", "bridge", _TABLE)


@contextmanager
def _isolated(network: PrivateNetwork, names: Sequence[str]) -> Iterator[None]:
    """None of these hears any other."""
    bridge = shutil.which("bridge", path="/usr/sbin:/sbin:/usr/bin:/bin") or "bridge"
    for name in names:
        network.at_switch(bridge, "link", "set", "dev", network.interface(name), "isolated", "on")
    try:
        yield
    finally:
        for name in names:
            network.at_switch(bridge, "link", "set", "dev", network.interface(name), "isolated", "off")
