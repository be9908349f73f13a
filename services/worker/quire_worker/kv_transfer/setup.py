"""AgentSetup: the settings that the engine sends to the KV transfer agent's process, as JSON over a socket that only
these two share. So the page MAC keys, which are secret, do not appear on the process's command line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from quire_common.config import ServiceConfig
from quire_common.credit import MoveKind
from quire_common.errors import ConfigError
from quire_common.kv.page_mac import PageMac
from quire_common.telemetry.logs import identity

if TYPE_CHECKING:
    from quire_common.credit import PageGeometry
    from quire_worker.config import WorkerConfig

DEFAULT_SLOTS = 64
DEFAULT_BYTES = 256 << 20
SLOT_ALIGN = 4096
STORE_KINDS = frozenset({MoveKind.LOAD, MoveKind.STORE})
PEER_KINDS = frozenset({MoveKind.PULL, MoveKind.EXPORT})


def slot_stride(page_bytes: int) -> int:
    """Return the distance between slots. Slots begin on memory pages of the machine, as disks and devices require."""
    return -(-page_bytes // SLOT_ALIGN) * SLOT_ALIGN


@dataclass(frozen=True)
class AgentSetup:
    """The settings of one agent process. The first half of the slots is for loads, whose pages the process puts into
    the ring. The second half is for stores, whose pages the engine puts in. So a slow store delays no load. A process
    for peers has pulls instead of loads, and exports instead of stores."""

    kvstore: str
    namespace: str
    """In hex."""
    dtype: str
    page_bytes: int
    slots: int
    instance: str = ""
    log_level: str = "info"
    log_format: str = "json"
    otlp_traces_endpoint: str = ""
    otlp_tls_ca: str = ""
    otlp_sampling_ratio: float = 1.0
    kv_transport: str = "auto"
    peers: bool = False
    """Whether the process moves pages from and to other workers, rather than a kvstore."""
    peer_transport: str = "auto"
    peer_grpc: str = ""
    """Where the process serves peers over gRPC; empty: nowhere."""
    peer_hosts: tuple[str, ...] = ()
    """The addresses that pulls may dial, as entries of PeerHosts."""
    shares_memory: bool = False
    """Peers of this host may open the engine's own memory and fetch its pages there."""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    page_mac_key: str = field(default="", repr=False)
    page_mac_key_file: str = ""

    @classmethod
    def of(
        cls,
        config: WorkerConfig,
        geometry: PageGeometry,
        *,
        peers: bool = False,
        peer_grpc: str = "",
        peer_hosts: tuple[str, ...] = (),
        shares_memory: bool = False,
    ) -> AgentSetup:
        """Return the setup for a loaded model's pages: of a kvstore's process, or, with `peers`, of a process for other
        workers. `peer_grpc` is the address on which that serves gRPC (empty: none), `peer_hosts` are the entries of
        PeerHosts. With `shares_memory`, peers may read the engine's own memory. The ring has as many slots as
        --mover-ring-bytes holds; by default 64, fewer if they exceed 256 MiB, but at least 2. Page size and dtype are
        those of the geometry's first group. Raises ConfigError if the given bytes hold fewer than two slots, or for bad
        page MAC keys."""
        PageMac.from_config(config.page_mac_key)  # bad keys must fail the start, not each page move
        group = geometry.groups[0]
        stride = slot_stride(group.page_bytes)
        default = max(2, min(DEFAULT_SLOTS, DEFAULT_BYTES // stride))
        slots = config.mover_ring_bytes // stride if config.mover_ring_bytes else default
        if slots < 2:
            raise ConfigError(
                "MOVER_RING_TOO_SMALL",
                f"The transfer agent's ring ({config.mover_ring_bytes} bytes) has {slots} pages of {group.page_bytes}.",
                f"Give --mover-ring-bytes at least {2 * stride}, or leave it out.",
                param="mover_ring_bytes",
            )
        return cls(
            kvstore="" if peers else config.kvstore,
            namespace=geometry.namespace.hex(),
            dtype=group.dtype,
            page_bytes=group.page_bytes,
            slots=slots,
            instance=identity()[1] or config.instance,
            log_level=config.log_level,
            log_format=config.log_format,
            otlp_traces_endpoint=config.otlp_traces_endpoint,
            otlp_tls_ca=config.otlp_tls_ca,
            otlp_sampling_ratio=config.otlp_sampling_ratio,
            kv_transport=config.kv_transport,
            peers=peers,
            peer_transport=config.peer_transport,
            peer_grpc=peer_grpc,
            peer_hosts=peer_hosts,
            shares_memory=shares_memory,
            tls_cert=config.tls_cert,
            tls_key=config.tls_key,
            tls_ca=config.tls_ca,
            page_mac_key=config.page_mac_key,
            page_mac_key_file=config.page_mac_key_file,
        )

    @property
    def kinds(self) -> frozenset[MoveKind]:
        """The kinds of moves that the process carries out."""
        return PEER_KINDS if self.peers else STORE_KINDS

    @property
    def load_slots(self) -> range:
        """Slots that the KV transfer agent fills."""
        return range(self.slots // 2)

    @property
    def store_slots(self) -> range:
        """Slots that the engine fills."""
        return range(self.slots // 2, self.slots)

    def service_config(self) -> ServiceConfig:
        """The TLS settings from which channels and servers are made."""
        return ServiceConfig(tls_cert=self.tls_cert, tls_key=self.tls_key, tls_ca=self.tls_ca)

    def page_mac(self) -> PageMac | None:
        """Make the MAC of pages that travel over a network; None if there are no keys."""
        return PageMac.from_config(self.page_mac_key, self.page_mac_key_file)

    def to_json(self) -> bytes:
        """Pack as the payload of a SETUP frame."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> AgentSetup:
        """Unpack the payload of a SETUP frame."""
        values = json.loads(data)
        return cls(**values | {"peer_hosts": tuple(values["peer_hosts"])})
