"""One session's Detokenize stream: the engine's rows in, ready text out, by handle.

It follows its session to another tokenizer when one dies, hangs or drains: every live choice is taken up again, just as
one that comes from another session is. Rows that come while no stream is up need no queue: their tokens are in the
choices. Rows that a slow tokenizer does not take are joined, so that what waits is bounded by the answers themselves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

import grpc

from quire.v1 import tokenizer_pb2 as tb
from quire_common import errors
from quire_common.cancellation import is_cancelled
from quire_common.columns import equal_lengths, i32, pack_i32
from quire_common.errors import QuireError, Unavailable
from quire_common.sequence import context_to_pb
from quire_common.telemetry.logs import get_logger
from quire_router.backoff import Backoff
from quire_router.text.rows_codec import join_rows

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from quire_router.config import RouterConfig
    from quire_router.core.choice import Choice
    from quire_router.text.tokenizer_link import TokenizerLink
    from quire_router.text.tokenizer_pool import TokenizerPool
    from quire_router.watchdog import Watchdog

# More steps than this are joined into one message.
MAX_STEPS = 256
log = get_logger(__name__)


class DetokenizeStream:
    """`choices` is the session's table; a choice whose text has ended is taken out of it here.

    `text_ended` is called for a choice that the tokenizer ended before the engine did.
    """

    def __init__(
        self,
        pool: TokenizerPool,
        watchdog: Watchdog,
        config: RouterConfig,
        choices: dict[int, Choice],
        text_ended: Callable[[Choice], None],
    ) -> None:
        self._pool = pool
        self._watchdog = watchdog
        self._config = config
        self._choices = choices
        self._text_ended = text_ended
        self._connected = False
        self._wake = asyncio.Event()
        self._opens: list[tuple[int, Choice]] = []
        self._rows: deque[tb.DetokenizeRequest] = deque()
        self._closes: list[int] = []
        # Messages that the tokenizer has not answered; it answers each.
        self._unanswered = 0
        self._refused = False

    @property
    def backlog(self) -> int:
        """Steps that the tokenizer has not taken yet."""
        return len(self._rows)

    def open(self, choice: Choice) -> None:
        """A choice's rows may come from now on. One that was elsewhere is taken up: opened with the tokens that were
        confirmed and the characters that were sent, and its unconfirmed tokens are repeated."""
        if not self._connected:
            return
        self._opens.append((choice.handle, choice))
        unconfirmed = choice.unconfirmed()
        choice.rows_out = choice.rows_back = 0
        if unconfirmed or choice.finish:
            choice.rows_out = 1
            self.rows(pack_i32([choice.handle]), pack_i32([len(unconfirmed) // 4]), unconfirmed, bytes([choice.finish]))
        self._wake.set()

    def rows(self, handle: bytes, count: bytes, token: bytes, finish: bytes) -> None:
        """One step of the engine, its columns as they came."""
        if self._connected:
            if len(self._rows) >= MAX_STEPS:
                self._rows = deque((join_rows(self._rows, self._choices),))
            self._rows.append(tb.DetokenizeRequest(handle=handle, count=count, token=token, finish=finish))
            self._wake.set()

    def close(self, handle: int) -> None:
        """Nobody wants the handle's text any more."""
        if self._connected:
            self._closes.append(handle)
            self._wake.set()

    async def run(self) -> None:
        """Until cancelled: one tokenizer after the other, as long as each lives."""
        backoff = Backoff()
        while True:
            try:
                peer = await self._pool.pick(self._config.migration_wait_s)
            except QuireError as error:
                self._fail_all(error)
                await backoff.wait()
                continue
            reason = "it ended the stream"
            try:
                reason = await self._life(peer, backoff)
            except grpc.aio.AioRpcError as error:
                reason = error.code().name
            except Exception:
                log.exception("detokenize stream failed", instance=peer.instance)
            log.warning("detokenize stream lost", instance=peer.instance, reason=reason, sequences=len(self._choices))
            peer.suspect()
            await backoff.wait()

    async def _life(self, peer: TokenizerLink, backoff: Backoff) -> str:
        """Returns why it moves on; raises grpc.RpcError."""
        self._take_up()
        call = peer.stub.Detokenize(self._outgoing(self._wake))
        watch = self._watchdog.watch(self._config.tokenizer_timeout_s, call.cancel, self._owed)
        try:
            async for message in call:
                backoff.reset()
                watch.quiet_s = 0.0
                self._unanswered -= 1
                self._answer(message)
                if self._refused:
                    return "it takes nobody on"
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            return "it hangs" if watch.expired else "a message could not be made"
        finally:
            self._watchdog.drop(watch)
            self._connected = False
            call.cancel()
            ended, self._wake = self._wake, asyncio.Event()
            ended.set()
        return "it ended the stream"

    def _take_up(self) -> None:
        """Start from what the choices know."""
        self._wake = asyncio.Event()
        self._opens, self._closes = [], []
        self._rows.clear()
        self._unanswered, self._refused = 0, False
        self._connected = True
        for choice in self._choices.values():
            self.open(choice)

    def _owed(self) -> bool:
        return bool(self._unanswered or self._rows or self._opens)

    async def _outgoing(self, wake: asyncio.Event) -> AsyncIterator[tb.DetokenizeRequest]:
        """`wake` is this life's own: what is left of an earlier stream cannot take its messages."""
        while True:
            await wake.wait()
            if wake is not self._wake:
                return
            wake.clear()
            while self._opens or self._rows or self._closes:
                message = self._rows.popleft() if self._rows else tb.DetokenizeRequest()
                if self._opens:
                    find = self._choices.get  # one that has left may have another handle by now
                    message.open.extend([_open_to_pb(c) for handle, c in self._opens if find(handle) is c])
                    self._opens = []
                if self._closes and not self._rows:  # a close must not overtake its handle's rows
                    message.close = pack_i32(self._closes)
                    self._closes = []
                self._unanswered += 1
                yield message
                if wake is not self._wake:
                    return

    def _answer(self, message: tb.DetokenizeResponse) -> None:
        handles, used = i32(message.handle, "handle"), i32(message.used, "used")
        stops = i32(message.stop_index, "stop_index")
        rows = equal_lengths("a DetokenizeResponse", handle=handles, used=used, stop_index=stops)
        offsets, at = i32(message.text_offset, "text_offset").tolist() if message.text_offset else None, 0
        share_us = message.elapsed_us / rows if rows else 0.0
        find = self._choices.get
        for handle, text, stop_index, count in zip(
            handles.tolist(), message.text, stops.tolist(), used.tolist(), strict=True
        ):
            choice = find(handle)
            if offsets is not None and handle & 1:
                if choice is not None:
                    choice.offsets += offsets[at : at + count]
                at += count
            if choice is None:
                continue
            choice.detokenize_us += share_us
            choice.detokenize_rows += 1
            if choice.delivered(text, stop_index, count):
                del self._choices[handle]
                if stop_index >= 0:
                    self._text_ended(choice)
        for failed in message.errors:
            error = errors.from_message(failed.error)
            if isinstance(error, Unavailable):  # the tokenizer's matter, not the request's: others take it on
                self._refused = True
                continue
            choice = self._choices.pop(failed.handle, None)
            if choice is not None:
                choice.fail(error)
                self._text_ended(choice)

    def _fail_all(self, error: QuireError) -> None:
        for handle, choice in list(self._choices.items()):
            del self._choices[handle]
            choice.fail(error)
            self._text_ended(choice)


def _open_to_pb(choice: Choice) -> tb.DetokenizeOpen:
    text, stop = choice.job.text, choice.sequence.stop
    return tb.DetokenizeOpen(
        handle=choice.handle,
        stop=text.stop,
        include_stop_str_in_output=text.include_stop_str_in_output,
        skip_special_tokens=text.skip_special_tokens,
        spaces_between_special_tokens=text.spaces_between_special_tokens,
        prior_ids=bytes(choice.output_ids[: 4 * choice.confirmed]),
        chars_sent=choice.chars_sent,
        min_tokens=stop.min_tokens,
        want_offsets=bool(choice.handle & 1),
        stop_token_ids=pack_i32(choice.stop_token_ids),
        context=context_to_pb(choice.context),
    )
