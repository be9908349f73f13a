"""All tokenizers that discovery names. Unary calls go round the healthy ones, and to another when one is gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import TYPE_CHECKING, TypeVar, cast

import grpc

from quire_common.cancellation import is_cancelled
from quire_common.errors import QuireError, Unavailable, as_quire_error
from quire_common.telemetry.logs import get_logger
from quire_router.text.poison import MOST_LOST, loses_tokenizers
from quire_router.text.public_error import as_public
from quire_router.text.tokenizer_link import TokenizerLink

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

    from quire_common.discovery import Endpoint
    from quire_router.config import RouterConfig

T = TypeVar("T")
_ATTEMPTS = 3
# What no tokenizer has said itself: see from_rpc_error and TokenizeStream.
_NOT_SAID = ("PEER_UNAVAILABLE", "TOKENIZER_LOST")
# Every other error is that of one request, also where it is Unavailable: the tokenizer goes on to serve.
_GONE = (*_NOT_SAID, "PEER_CANCELLED", "TOKENIZER_DRAINING", "TOKENIZER_LOADING")
log = get_logger(__name__)


class _Lost(Exception):
    """A tokenizer went away or hangs. `worked`: it may have been lost by the call, on which it had begun to work."""

    def __init__(self, reason: str, *, worked: bool) -> None:
        super().__init__(reason)
        self.worked = worked


class TokenizerPool:
    """Peers by instance. All methods run in the event loop."""

    def __init__(self, config: RouterConfig, changed: Callable[[], None]) -> None:
        self.peers: dict[str, TokenizerLink] = {}
        self._config = config
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = changed
        self._news = asyncio.Event()
        self._turn = 0
        # Unary calls in flight, by tokenizer.
        self._calls: Counter[TokenizerLink] = Counter()
        # Held by the one suspect that is tried again; and the tokenizer that this suspect has to itself.
        self._suspects_turn = asyncio.Lock()
        self._reserved: TokenizerLink | None = None

    @property
    def ready(self) -> bool:
        """Whether any tokenizer answers."""
        return any(peer.healthy for peer in self.peers.values())

    def update(self, endpoints: Sequence[Endpoint]) -> None:
        """Take discovery's newest list: new tokenizers are connected; those that have left, or have another address,
        are dropped."""
        wanted = {endpoint.instance: endpoint for endpoint in endpoints}
        for instance, peer in list(self.peers.items()):
            if instance not in wanted or wanted[instance].address != peer.address:
                self.peers.pop(instance).suspect()
                self._tasks.pop(instance).cancel()
        for instance, endpoint in wanted.items():
            if instance not in self.peers:
                peer = self.peers[instance] = TokenizerLink(instance, endpoint.address, self._config, self._on_change)
                self._tasks[instance] = asyncio.create_task(peer.run(), name=f"tokenizer {instance}")

    async def pick(self, wait_s: float, *, free: bool = False) -> TokenizerLink:
        """Return the next healthy tokenizer, by turns; while there is none, wait up to `wait_s`. `free`: for so long,
        leave the tokenizer alone that a suspect has to itself. Raises Unavailable."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not self._healthy(free=free):
                    self._news.clear()
                    await self._news.wait()
        healthy = self._healthy(free=free) or self._healthy()
        if not healthy:
            raise no_tokenizer()
        self._turn += 1
        return healthy[self._turn % len(healthy)]

    def _healthy(self, *, free: bool = False) -> list[TokenizerLink]:
        return [peer for peer in self.peers.values() if peer.healthy and not (free and peer is self._reserved)]

    async def call(self, make: Callable[[TokenizerLink], Awaitable[T]]) -> T:
        """Run a unary call on a healthy tokenizer and, if that goes away or hangs, on another one, at most three times.
        Raises QuireError.

        Calls that were lost with a tokenizer are tried again one by one, each with a tokenizer to itself. So of several
        that were lost together, only the one that is to blame loses a second tokenizer; it fails then.
        """
        attempts = lost = 0
        while attempts < _ATTEMPTS:
            peer = await self.pick(self._config.connect_timeout_s, free=not lost)
            async with self._alone_at(peer) if lost else contextlib.nullcontext():
                if lost and not peer.healthy:
                    continue
                attempts += 1
                try:
                    with self._in_flight(peer):
                        return await self._attempt(peer, make)
                except _Lost as error:
                    log.debug("tokenizer call failed", instance=peer.instance, attempt=attempts, reason=str(error))
                    peer.suspect()
                    # A suspect that was not alone is not to blame more than those beside it.
                    lost += error.worked and (not lost or self._reserved is peer)
            if lost >= MOST_LOST:
                raise loses_tokenizers()
        raise no_tokenizer()

    @contextlib.asynccontextmanager
    async def _alone_at(self, peer: TokenizerLink) -> AsyncIterator[None]:
        """Wait for the turn of a suspect, reserve the tokenizer, and wait until it has no other call. A call that takes
        longer than `--tokenizer-timeout-s` is not waited for: then the suspect runs beside it."""
        async with self._suspects_turn:
            self._reserved = peer
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._config.tokenizer_timeout_s):
                        while self._calls[peer]:
                            self._news.clear()
                            await self._news.wait()
                yield
            finally:
                self._reserved = None
                self._news.set()

    @contextlib.contextmanager
    def _in_flight(self, peer: TokenizerLink) -> Iterator[None]:
        """Count a call at the tokenizer while the `with` block lasts. With two calls at once it is reserved no more."""
        if self._calls[peer] and self._reserved is peer:
            self._reserved = None
            self._news.set()
        self._calls[peer] += 1
        try:
            yield
        finally:
            self._calls[peer] -= 1
            if not self._calls[peer]:
                del self._calls[peer]
                self._news.set()

    async def _attempt(self, peer: TokenizerLink, make: Callable[[TokenizerLink], Awaitable[T]]) -> T:
        """Return the tokenizer's answer. Raises _Lost where the tokenizer goes away or hangs, and QuireError for an
        error that it answers."""
        connected = peer.connected
        try:
            answered, answer = await self._ask(peer, make)
        except (grpc.aio.AioRpcError, QuireError) as error:
            typed = as_quire_error(error)
            if typed.code not in _GONE:
                raise as_public(typed) from error
            raise _Lost(typed.message, worked=connected and typed.code in _NOT_SAID) from error
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise _Lost("it left discovery, and its channel is closed", worked=False) from None
        if not answered:
            raise _Lost("it hangs", worked=True)
        return cast(T, answer)

    async def _ask(self, peer: TokenizerLink, make: Callable[[TokenizerLink], Awaitable[T]]) -> tuple[bool, T | None]:
        """Return whether the tokenizer answered, and its answer. A call may take long, as long as the tokenizer answers
        short calls meanwhile.

        A tokenizer may be silent for half of its timeout; the other half is the time in which it has to answer a short
        call.
        """
        half_s = self._config.tokenizer_timeout_s / 2
        call = asyncio.ensure_future(make(peer))
        try:
            while True:
                done, _ = await asyncio.wait({call}, timeout=half_s)
                if done:
                    return True, call.result()
                if not await peer.answers(half_s) and not call.done():
                    return False, None
        finally:
            call.cancel()

    async def close(self) -> None:
        """Cancel the tasks of all tokenizers, and wait for their end."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_change(self) -> None:
        self._news.set()
        self._changed()


def no_tokenizer() -> Unavailable:
    """Make the error for a request that no tokenizer can encode or decode."""
    return Unavailable(
        "NO_TOKENIZER", "No tokenizer answers.", "Retry after the given time; see /readyz.", retry_after_s=1.0
    )
