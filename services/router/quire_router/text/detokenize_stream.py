"""One session's Detokenize stream: the engine's rows in, ready text out, by handle.

It follows its session to another tokenizer when one dies, hangs or drains: every live choice is taken up again, just as
one that comes from another session is. Rows that come while no stream is up need no queue: their tokens are in the
choices. What a tokenizer had not answered when it was lost is suspected of it (see poison.py).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc

from quire.v1 import tokenizer_pb2 as tb
from quire_common import errors
from quire_common.cancellation import is_cancelled
from quire_common.columns import equal_lengths, i32
from quire_common.errors import QuireError, Unavailable
from quire_common.telemetry.logs import get_logger
from quire_router.backoff import Backoff
from quire_router.text.poison import MOST_LOST, loses_tokenizers
from quire_router.text.stream_outgoing import DetokenizeOutgoing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quire_router.config import RouterConfig
    from quire_router.sequences.sequence_state import SequenceState
    from quire_router.text.tokenizer_link import TokenizerLink
    from quire_router.text.tokenizer_pool import TokenizerPool
    from quire_router.watchdog import Watchdog

# The tokenizer may have done more than it could tell.
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
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
        sequences: dict[int, SequenceState],
        text_ended: Callable[[SequenceState], None],
    ) -> None:
        self._pool = pool
        self._watchdog = watchdog
        self._config = config
        self._sequences = sequences
        self._text_ended = text_ended
        self._out = DetokenizeOutgoing(sequences, self._failed)
        # Whether the tokenizer has said that it is there.
        self._connected = False
        self._refused = False
        # The parts so far of a row whose text comes in several answers.
        self._begun: list[str] = []

    @property
    def backlog(self) -> int:
        """Steps that the tokenizer has not taken yet."""
        return self._out.backlog

    def open(self, sequence: SequenceState) -> None:
        """A choice's rows may come from now on."""
        if self._connected:
            self._out.open(sequence)

    def rows(self, handle: bytes, count: bytes, token: bytes, finish: bytes) -> None:
        """One step of the engine, its columns as they came."""
        if self._connected:
            self._out.rows(tb.DetokenizeRequest(handle=handle, count=count, token=token, finish=finish))

    def close(self, handle: int) -> None:
        """Nobody wants the handle's text any more."""
        if self._connected:
            self._out.close(handle)

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
            log.warning("detokenize stream lost", instance=peer.instance, reason=reason, sequences=len(self._sequences))
            peer.suspect()
            await backoff.wait()

    async def _life(self, peer: TokenizerLink, backoff: Backoff) -> str:
        """Returns why it moves on; raises grpc.RpcError."""
        out = self._out = DetokenizeOutgoing(self._sequences, self._failed)
        self._refused, self._begun = False, []
        call = peer.stub.Detokenize(out.messages())
        watch = self._watchdog.watch(self._config.tokenizer_timeout_s, call.cancel, lambda: out.owed)
        try:
            async for message in call:
                backoff.reset()
                watch.quiet_s = 0.0
                if not self._connected:
                    self._take_up(out)
                if not message.more and (cleared := out.answered()) is not None:
                    cleared.text_strikes = 0
                self._answer(message)
                if self._refused:
                    return "it takes nobody on"
        except grpc.aio.AioRpcError as error:
            self._suspect(out, oldest=error.code() not in _GONE)
            raise
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            if watch.expired:
                self._suspect(out, oldest=True)
            return "it hangs" if watch.expired else "a message could not be made"
        finally:
            self._watchdog.drop(watch)
            self._connected = False
            call.cancel()
            out.end()
        return "it ended the stream"

    def _take_up(self, out: DetokenizeOutgoing) -> None:
        """Start from what the choices know, the shortest first."""
        self._connected = True
        for sequence in sorted(self._sequences.values(), key=lambda sequence: len(sequence.output_ids)):
            out.open(sequence)

    def _suspect(self, out: DetokenizeOutgoing, *, oldest: bool) -> None:
        """The tokenizer is lost. Messages are worked on in their order: of one that lives and answers no more, the
        oldest holds what it hangs on. One that never said that it is there was not lost by any request."""
        if not self._connected:
            return
        for handle in out.unanswered(oldest=oldest):
            sequence = self._sequences.get(handle)
            if sequence is None:
                continue
            sequence.text_strikes += 1
            if sequence.text_strikes >= MOST_LOST:
                log.warning("a request loses tokenizers", request_id=sequence.context.request_id)
                del self._sequences[handle]
                self._failed(sequence, loses_tokenizers())

    def _answer(self, message: tb.DetokenizeResponse) -> None:
        handles, used = i32(message.handle, "handle"), i32(message.used, "used")
        stops = i32(message.stop_index, "stop_index")
        rows = equal_lengths("a DetokenizeResponse", handle=handles, used=used, stop_index=stops)
        offsets, at = i32(message.text_offset, "text_offset").tolist() if message.text_offset else None, 0
        share_us = message.elapsed_us / rows if rows else 0.0
        texts: Sequence[str] = message.text
        if message.cut or self._begun:
            texts = self._whole_texts(message)
            handles, stops, used = handles[: len(texts)], stops[: len(texts)], used[: len(texts)]
        find = self._sequences.get
        for handle, text, stop_index, count in zip(handles.tolist(), texts, stops.tolist(), used.tolist(), strict=True):
            sequence = find(handle)
            if offsets is not None and handle & 1:
                if sequence is not None:
                    sequence.offsets += offsets[at : at + count]
                at += count
            if sequence is None:
                continue
            sequence.detokenize_us += share_us
            sequence.detokenize_rows += 1
            if sequence.delivered(text, stop_index, count):
                del self._sequences[handle]
                if stop_index >= 0:
                    self._text_ended(sequence)
        for failed in message.errors:
            error = errors.from_message(failed.error)
            if isinstance(error, Unavailable):  # the tokenizer's matter, not the request's: others take it on
                self._refused = True
                continue
            sequence = self._sequences.pop(failed.handle, None)
            if sequence is not None:
                self._failed(sequence, error)

    def _whole_texts(self, message: tb.DetokenizeResponse) -> list[str]:
        """Return the texts of complete rows: text counts when its tokens do, or another tokenizer is told wrong."""
        texts = list(message.text)
        if message.cut and len(texts) == 1:
            self._begun += texts
            return []
        if texts and self._begun:
            texts[0] = "".join((*self._begun, texts[0]))
            self._begun = []
        if message.cut:
            self._begun.append(texts.pop())
        return texts

    def _fail_all(self, error: QuireError) -> None:
        for handle, sequence in list(self._sequences.items()):
            del self._sequences[handle]
            self._failed(sequence, error)

    def _failed(self, sequence: SequenceState, error: QuireError) -> None:
        sequence.fail(error)
        self._text_ended(sequence)
