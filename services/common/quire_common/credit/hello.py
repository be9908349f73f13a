"""The first frames of a Run stream: the worker's identity, the model and pages that it serves, and its epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.v1 import common_pb2, worker_pb2
from quire_common.columns import i32, pack_i32
from quire_common.errors import FailedPrecondition

if TYPE_CHECKING:
    from collections.abc import Iterable

PROTOCOL_VERSION = 1
SamplingDefaults = tuple[tuple[str, float], ...]
"""A model's own values of parameters that a request over HTTP leaves out: by name, within the parameters' bounds."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """Identifies one life of the worker's process (boot id) and one run within it. Each scheduler that attaches begins
    a run."""

    boot_id: int
    run: int


@dataclass(frozen=True, slots=True)
class ShardRange:
    """A range of bytes of a page that one rank of a worker group holds. The rank's part of a page is its ranges, one
    after the other."""

    rank: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class KvGroup:
    """One kind of per-token state. `page_bytes` covers all layers and ranks. Without shards, one rank holds whole
    pages."""

    name: str
    page_bytes: int
    layout: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    window: int = 0
    shards: tuple[ShardRange, ...] = ()


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """Tokens per page, the groups, and the namespace that opens every page key."""

    page_size: int
    groups: tuple[KvGroup, ...]
    namespace: bytes


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The facts about the model that routers and clients may know."""

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    digest: bytes
    pages: PageGeometry
    parameters: int = 0
    weights_version: str = ""
    capabilities: tuple[str, ...] = ()
    sampling_defaults: SamplingDefaults = ()


@dataclass(frozen=True, slots=True)
class RankAddress:
    """The place where one rank of a worker group serves pages. `transport` finds it by `descriptor`."""

    rank: int
    transport: str
    descriptor: bytes


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """The worker's side of the first frame. num_pages is per group and counts page 0, which is never granted."""

    epoch: Epoch
    num_slots: int
    max_num_seqs: int
    num_pages: tuple[int, ...]
    model: ModelInfo
    capabilities: tuple[str, ...] = ()
    data_address: tuple[RankAddress, ...] = ()
    """Where other workers may pull pages."""
    max_step_tokens: int = 0
    """Most prompt tokens of a step; 0: the worker does not mind."""
    max_row_tokens: int = 1
    """The most tokens that a decode row may sample in one step."""
    max_constrained_row_tokens: int = 1
    """The limit of a row whose sequence has a grammar: its drafts are forced tokens."""
    host: bytes = b""
    """Equal where workers reach each other's memory; empty: nobody's neighbour."""


def addresses_to_pb(addresses: Iterable[RankAddress]) -> list[common_pb2.RankAddress]:
    """Domain to wire."""
    return [common_pb2.RankAddress(rank=a.rank, transport=a.transport, descriptor=a.descriptor) for a in addresses]


def addresses_from_pb(messages: Iterable[common_pb2.RankAddress]) -> tuple[RankAddress, ...]:
    """Wire to domain."""
    return tuple(RankAddress(message.rank, message.transport, message.descriptor) for message in messages)


def epoch_to_pb(epoch: Epoch) -> common_pb2.Epoch:
    """Domain to wire."""
    return common_pb2.Epoch(boot_id=epoch.boot_id, run=epoch.run)


def epoch_from_pb(message: common_pb2.Epoch) -> Epoch:
    """Wire to domain."""
    return Epoch(message.boot_id, message.run)


def scheduler_hello(capabilities: tuple[str, ...] = (), *, expects_peers: bool = False) -> worker_pb2.Grant:
    """Return the scheduler's first frame, a Grant with its hello: protocol version and capabilities. `expects_peers`:
    whether this worker will exchange pages with other workers."""
    hello = worker_pb2.Hello(protocol_version=PROTOCOL_VERSION, capabilities=capabilities, expects_peers=expects_peers)
    return worker_pb2.Grant(hello=hello)


def check_hello(message: worker_pb2.Hello) -> None:
    """Raise FailedPrecondition if the peer speaks another version of the credit protocol."""
    if message.protocol_version != PROTOCOL_VERSION:
        raise FailedPrecondition(
            "PROTOCOL_VERSION",
            f"The peer speaks version {message.protocol_version} of the credit protocol, this side {PROTOCOL_VERSION}.",
            "Deploy the scheduler and its worker from one release.",
        )


def worker_hello_to_pb(hello: WorkerHello) -> worker_pb2.Hello:
    """Encode the worker's hello, with this side's protocol version."""
    return worker_pb2.Hello(
        protocol_version=PROTOCOL_VERSION,
        capabilities=hello.capabilities,
        epoch=epoch_to_pb(hello.epoch),
        pages=geometry_to_pb(hello.model.pages),
        num_slots=hello.num_slots,
        max_num_seqs=hello.max_num_seqs,
        num_pages=hello.num_pages,
        model=model_to_pb(hello.model),
        data_address=addresses_to_pb(hello.data_address),
        max_step_tokens=hello.max_step_tokens,
        max_row_tokens=hello.max_row_tokens,
        max_constrained_row_tokens=hello.max_constrained_row_tokens,
        host=hello.host,
    )


def worker_hello_from_pb(message: worker_pb2.Hello) -> WorkerHello:
    """Decode a worker's hello. The two numbers of row tokens are at least 1. Raises FailedPrecondition for another
    protocol version."""
    check_hello(message)
    return WorkerHello(
        epoch=epoch_from_pb(message.epoch),
        num_slots=message.num_slots,
        max_num_seqs=message.max_num_seqs,
        num_pages=tuple(message.num_pages),
        model=model_from_pb(message.model),
        capabilities=tuple(message.capabilities),
        data_address=addresses_from_pb(message.data_address),
        max_step_tokens=message.max_step_tokens,
        max_row_tokens=max(message.max_row_tokens, 1),
        max_constrained_row_tokens=max(message.max_constrained_row_tokens, 1),
        host=message.host,
    )


def geometry_to_pb(pages: PageGeometry) -> common_pb2.PageGeometry:
    """Encode a page geometry. A group's retention follows from its window: sliding if it has one, else full."""
    groups = [
        common_pb2.KvGroup(
            name=g.name,
            retention=(common_pb2.KvGroup.RETENTION_SLIDING_WINDOW if g.window else common_pb2.KvGroup.RETENTION_FULL),
            page_bytes=g.page_bytes,
            layout=g.layout,
            dtype=g.dtype,
            layers=g.layers,
            kv_heads=g.kv_heads,
            head_dim=g.head_dim,
            window=g.window,
            shards=[common_pb2.ShardRange(rank=s.rank, offset=s.offset, length=s.length) for s in g.shards],
        )
        for g in pages.groups
    ]
    return common_pb2.PageGeometry(page_size=pages.page_size, groups=groups, namespace=pages.namespace)


def geometry_from_pb(message: common_pb2.PageGeometry) -> PageGeometry:
    """Wire to domain."""
    return PageGeometry(message.page_size, tuple(map(_group_from_pb, message.groups)), message.namespace)


def _group_from_pb(group: common_pb2.KvGroup) -> KvGroup:
    """Decode one KV group."""
    return KvGroup(
        group.name,
        group.page_bytes,
        group.layout,
        group.dtype,
        group.layers,
        group.kv_heads,
        group.head_dim,
        group.window,
        tuple(ShardRange(shard.rank, shard.offset, shard.length) for shard in group.shards),
    )


def model_to_pb(model: ModelInfo) -> common_pb2.ModelInfo:
    """Encode the model's facts."""
    return common_pb2.ModelInfo(
        name=model.name,
        architecture=model.architecture,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=pack_i32(model.eos_token_ids),
        digest=model.digest,
        pages=geometry_to_pb(model.pages),
        parameters=model.parameters,
        weights_version=model.weights_version,
        capabilities=model.capabilities,
        sampling_defaults=common_pb2.SamplingDefaults(**dict(model.sampling_defaults)),  # type: ignore[arg-type]  # fields by name
    )


def model_from_pb(message: common_pb2.ModelInfo) -> ModelInfo:
    """Decode the model's facts."""
    return ModelInfo(
        name=message.name,
        architecture=message.architecture,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        eos_token_ids=tuple(i32(message.eos_token_ids, "eos_token_ids").tolist()),
        digest=message.digest,
        pages=geometry_from_pb(message.pages),
        parameters=message.parameters,
        weights_version=message.weights_version,
        capabilities=tuple(message.capabilities),
        sampling_defaults=tuple((field.name, value) for field, value in message.sampling_defaults.ListFields()),
    )
