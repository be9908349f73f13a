"""All tokenizers that discovery names. Calls other than Detokenize go to the healthy tokenizers in turn. If a tokenizer
is lost, its calls go to another tokenizer.

A suspect is a call that a tokenizer worked on when this tokenizer was lost. See poison.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import TYPE_CHECKING, TypeVar, cast

import grpc

from quire_common.cancellation import is_cancelled
from quire_common.errors import QuireError, Unavailable, as_quire_error
from quire_common.telemetry.logs import get_logger
from quire_router.ending_tasks import EndingTasks
from quire_router.text.poison import MOST_LOST, loses_tokenizers
from quire_router.text.public_error import as_public
from quire_router.text.tokenizer_link import TokenizerLink

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

    from quire_common.discovery import Endpoint
    from quire_router.config import RouterConfig

T = TypeVar("T")
_ATTEMPTS = 3
# Codes that no tokenizer has sent: from_rpc_error and TokenizeStream make them when the connection is lost.
_NOT_SAID = ("PEER_UNAVAILABLE", "TOKENIZER_LOST")
# These codes mean that the tokenizer cannot be used. Any other code, even of an Unavailable, concerns one request only.
_GONE = (*_NOT_SAID, "PEER_CANCELLED", "TOKENIZER_DRAINING", "TOKENIZER_LOADING")
log = get_logger(__name__)


class _Lost(Exception):
    """A tokenizer went away or hangs. `worked`: the tokenizer had begun to work on the call, so the call may be the
    cause."""

    def __init__(self, reason: str, *, worked: bool) -> None:
        super().__init__(reason)
        self.worked = worked


class TokenizerPool:
    """The links to all tokenizers. `peers` has them by instance. All methods run in the event loop."""

    def __init__(self, config: RouterConfig, changed: Callable[[], None]) -> None:
        self.peers: dict[str, TokenizerLink] = {}
        self._config = config
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending = EndingTasks()
        self._changed = changed
        self._news = asyncio.Event()
        self._turn = 0
        # Unary calls in flight, by tokenizer.
        self._calls: Counter[TokenizerLink] = Counter()
        # One suspect at a time holds this lock and is tried again. `_reserved` is the tokenizer that it has to itself.
        self._suspects_turn = asyncio.Lock()
        self._reserved: TokenizerLink | None = None

    @property
    def ready(self) -> bool:
        """Whether any tokenizer answers."""
        return any(peer.healthy for peer in self.peers.values())

    def update(self, endpoints: Sequence[Endpoint]) -> None:
        """Apply the newest list of discovery: connect new tokenizers, and drop tokenizers that have left, whose calls
        go to others. A tokenizer with another address is dropped and connected again."""
        wanted = {endpoint.instance: endpoint for endpoint in endpoints}
        for instance, peer in list(self.peers.items()):
            if instance not in wanted or wanted[instance].address != peer.address:
                self.peers.pop(instance).suspect()
                self._ending.drop(self._tasks.pop(instance))
        for instance, endpoint in wanted.items():
            if instance not in self.peers:
                peer = self.peers[instance] = TokenizerLink(instance, endpoint.address, self._config, self._on_change)
                self._tasks[instance] = asyncio.create_task(peer.run(), name=f"tokenizer {instance}")

    async def pick(self, wait_s: float, *, free: bool = False) -> TokenizerLink:
        """Return a healthy tokenizer; successive calls take the tokenizers in turn. If no tokenizer is healthy, wait up
        to `wait_s`, then raise Unavailable. With `free`, a tokenizer that is reserved for the retry of a suspect call
        is returned only if no other tokenizer becomes healthy within `wait_s`."""
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
        """Run a call with one answer on a healthy tokenizer. If this tokenizer goes away, drains or hangs, mark it as
        lost (see `TokenizerLink.suspect`), and run the call on another tokenizer; at most three attempts are made.
        Raises the tokenizer's error about the request, and TOKENIZER_LIMIT for a call with two losses that count.
        Raises NO_TOKENIZER if no tokenizer is healthy for `connect_timeout_s`, or three attempts have failed.

        The calls that a lost tokenizer worked on become suspects. Suspects are tried again one after the other, each
        with a tokenizer to itself if possible. A loss while other calls ran beside a suspect does not count against it.
        So the second loss that counts nearly always belongs to the call that causes the losses; this call fails then.
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
                    # If other calls ran beside the suspect, each of them may be the cause as well.
                    lost += error.worked and (not lost or self._reserved is peer)
            if lost >= MOST_LOST:
                raise loses_tokenizers()
        raise no_tokenizer()

    @contextlib.asynccontextmanager
    async def _alone_at(self, peer: TokenizerLink) -> AsyncIterator[None]:
        """While the `with` block lasts, reserve the tokenizer for one suspect call. First wait until no other suspect
        is tried, then until the other calls at this tokenizer have ended, but at most `--tokenizer-timeout-s`. After
        that time, the suspect runs while other calls run."""
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
        """Count a call at the tokenizer while the `with` block lasts. A second call at a reserved tokenizer ends the
        reservation."""
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
        """Make one call at this tokenizer and return the answer. Raises _Lost if the tokenizer goes away, drains, still
        loads or hangs; its `worked` says whether the call may be the cause. Raises QuireError if the tokenizer answers
        with another error. A cancellation of the caller passes through."""
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
        """Return whether the tokenizer answered, and its answer. Raises the call's error. While the tokenizer still
        answers short calls, only a timeout of the call's own ends it.

        After each half of `--tokenizer-timeout-s` without an answer, the pool makes a short call. If the tokenizer does
        not answer the short call within the other half, it hangs: the call is cancelled, and the result is (False,
        None).
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
        """Cancel the tasks of all tokenizers, and wait for their end, also for those of tokenizers that were
        dropped."""
        for task in self._tasks.values():
            self._ending.drop(task)
        await self._ending.wait()

    def _on_change(self) -> None:
        self._news.set()
        self._changed()


def no_tokenizer() -> Unavailable:
    """Make the error (Unavailable, NO_TOKENIZER, retry after a second) for a request that no tokenizer can encode or
    decode."""
    return Unavailable(
        "NO_TOKENIZER", "No tokenizer answers.", "Retry after the given time; see /readyz.", retry_after_s=1.0
    )
