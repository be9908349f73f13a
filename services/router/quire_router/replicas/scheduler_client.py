"""The calls to one scheduler, except for the session stream. Results are plain values, but for the page events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.v1 import common_pb2 as pb
from quire.v1 import scheduler_pb2 as sb
from quire.v1 import scheduler_pb2_grpc
from quire_common.channel import aio_channel
from quire_common.credit.hello import ModelInfo, epoch_from_pb, model_from_pb
from quire_common.identity.callers import SCHEDULER
from quire_common.ticket import ticket_from_pb
from quire_router.placement.load import Load

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from quire_common.ticket import Ticket
    from quire_router.config import RouterConfig

LOAD_INTERVAL_MS = 200
_INFO_TIMEOUT_S = 10.0
# Steps that the router has not read yet wait at the scheduler, which joins them, and not in a growing HTTP/2 window.
# With this window, the scheduler also joins steps for a router that keeps up, if the round trip is long: some 15 ms
# with 256 sequences, 3 KiB a step, and a step each 3 ms.
_SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 1 << 14), ("grpc.http2.bdp_probe", 0))


class SchedulerClient:
    """One channel. Calls raise grpc.RpcError; `model` and `ticket` also raise InvalidArgument for a malformed
    answer."""

    def __init__(self, address: str, config: RouterConfig) -> None:
        self._channel = aio_channel(address, config, SCHEDULER, _SMALL_WINDOW)
        self.stub = scheduler_pb2_grpc.SchedulerStub(self._channel)

    async def watch_load(self) -> AsyncIterator[Load]:
        """Yield the scheduler's load until the scheduler ends the call: at once after a change of phase or role, every
        200 ms at most after other changes, and as a heartbeat when it has not changed for 2 s."""
        async for message in self.stub.WatchLoad(sb.WatchLoadRequest(interval_ms=LOAD_INTERVAL_MS)):
            yield load_from_pb(message)

    async def model(self) -> tuple[ModelInfo, str]:
        """Return the scheduler's model, and its role."""
        response = await self.stub.GetModelInfo(sb.GetModelInfoRequest(), timeout=_INFO_TIMEOUT_S)
        return model_from_pb(response.model), response.role

    async def ticket(self, transfer_id: bytes, timeout_s: float) -> Ticket:
        """Return the ticket of a transfer that is open at the scheduler. Raises grpc.RpcError, and InvalidArgument for
        a ticket that contradicts itself."""
        response = await self.stub.GetTicket(sb.GetTicketRequest(transfer_id=transfer_id), timeout=timeout_s)
        return ticket_from_pb(response.ticket)

    async def drain(self, timeout_s: float) -> None:
        """Let the scheduler refuse new requests; return when no request runs there any more. The scheduler aborts
        requests that still run after `timeout_s` (0: never)."""
        await self.stub.Drain(sb.DrainRequest(timeout_ms=round(timeout_s * 1000)))

    async def set_role(self, role: str, timeout_s: float) -> None:
        """Change the scheduler's role; return when it has changed. Some requests must end before the change. The
        scheduler aborts such requests if they still run after `timeout_s` (0: never)."""
        await self.stub.SetRole(sb.SetRoleRequest(role=role, drain_timeout_ms=round(timeout_s * 1000)))

    async def watch_pages(self, epoch: pb.Epoch | None, after_sequence: int) -> AsyncGenerator[pb.PageEvents, None]:
        """Yield the scheduler's page events, with token ids. The events begin after number `after_sequence` of `epoch`
        (None: with a snapshot). If the scheduler does not have these events any more, it sends a snapshot first. The
        call is cancelled when the generator is closed."""
        request = pb.WatchPagesRequest(epoch=epoch, after_sequence=after_sequence, with_token_ids=True)
        call = self.stub.WatchPages(request)
        try:
            async for frame in call:
                yield frame
        finally:
            call.cancel()

    async def close(self) -> None:
        """End all calls."""
        await self._channel.close()


def load_from_pb(message: sb.Load) -> Load:
    """Convert a load from the wire. `epoch` is None if the message has none, and `max_num_seqs` is at least 1."""
    return Load(
        message.phase,
        message.progress,
        message.detail,
        message.running,
        message.waiting,
        max(1, message.max_num_seqs),
        message.pages,
        message.free_pages,
        message.referenced_pages,
        message.waiting_prefill_tokens,
        message.decode_tokens_per_s,
        message.prefill_tokens_per_s,
        message.role,
        message.open_transfers,
        message.pull_bytes_per_s,
        message.near_pull_bytes_per_s,
        epoch_from_pb(message.epoch) if message.HasField("epoch") else None,
        message.host,
        message.kvstore_boot_id,
        message.step_ms,
        message.oldest_wait_ms,
        message.version,
        message.certificate_expiry_unix_s,
    )
