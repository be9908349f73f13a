"""One session's Detokenize stream: the engine's rows in, ready text out, by handle.

It follows its session to another tokenizer when one dies, hangs or drains: every live sequence is taken up again, as
one that comes from another session is. Rows that come while no stream is up need no queue: their tokens are in the
sequences. What a tokenizer had not answered when it was lost is suspected of it (see poison.py).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc

from quire.v1 import tokenizer_pb2 as tb
from quire_common.cancellation import is_cancelled
from quire_common.errors import QuireError, Unavailable
from quire_common.telemetry.logs import get_logger
from quire_router.backoff import Backoff
from quire_router.text.detokenized_codec import detokenized
from quire_router.text.poison import MOST_LOST, loses_tokenizers
from quire_router.text.stream_outgoing import DetokenizeOutgoing

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_router.config import RouterConfig
    from quire_router.sequences.sequence_state import SequenceState
    from quire_router.text.detokenized_codec import Detokenized
    from quire_router.text.tokenizer_link import TokenizerLink
    from quire_router.text.tokenizer_pool import TokenizerPool
    from quire_router.watchdog import Watchdog

# The tokenizer may have done more than it could tell.
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
log = get_logger(__name__)


class DetokenizeStream:
    """`sequences` is the session's table; a sequence whose text has ended is taken out of it here.

    `text_ended` is called for a sequence that the tokenizer ended before the engine did.
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
        self._out = DetokenizeOutgoing(sequences, self._fail)
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
        """Open a sequence at the tokenizer, so that rows may follow. Without a stream nothing happens: the next one
        opens all."""
        if self._connected:
            self._out.open(sequence)

    def rows(self, handle: bytes, count: bytes, token: bytes, finish: bytes) -> None:
        """Send one step of the engine, its columns as they came. Without a stream nothing happens: the tokens are in
        the sequences."""
        if self._connected:
            self._out.rows(tb.DetokenizeRequest(handle=handle, count=count, token=token, finish=finish))

    def close(self, handle: int) -> None:
        """Tell the tokenizer that nobody wants the handle's text any more."""
        if self._connected:
            self._out.close(handle)

    async def run(self) -> None:
        """Run a stream to one tokenizer after the other until cancelled. Where none is to be had for
        `--migration-wait-s`, all sequences fail."""
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
                reason = await self._run_stream(peer, backoff)
            except grpc.aio.AioRpcError as error:
                reason = error.code().name
            except Exception:
                log.exception("detokenize stream failed", instance=peer.instance)
            log.warning("detokenize stream lost", instance=peer.instance, reason=reason, sequences=len(self._sequences))
            peer.suspect()
            await backoff.wait()

    async def _run_stream(self, peer: TokenizerLink, backoff: Backoff) -> str:
        """Run one stream; return why it ended. Its first answer opens all sequences. Where the tokenizer is lost, the
        loss is counted against sequences that it had not answered. Raises grpc.RpcError."""
        out = self._out = DetokenizeOutgoing(self._sequences, self._fail)
        self._refused, self._begun = False, []
        call = peer.stub.Detokenize(out.messages())
        watch = self._watchdog.watch(self._config.tokenizer_timeout_s, call.cancel, lambda: out.owed)
        try:
            async for message in call:
                backoff.reset()
                watch.hear()
                if not self._connected:
                    self._take_up(out)
                if not message.more and (cleared := out.answered()) is not None:
                    cleared.text.clear_strikes()
                self._apply(detokenized(message))
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
        """Open all sequences on the stream, those with the fewest tokens first."""
        self._connected = True
        for sequence in sorted(self._sequences.values(), key=lambda sequence: len(sequence.engine.output_ids)):
            out.open(sequence)

    def _suspect(self, out: DetokenizeOutgoing, *, oldest: bool) -> None:
        """Count the lost tokenizer against the sequences in its unanswered messages; with `oldest`, in the first of
        them alone, since a tokenizer that hangs works on that one. The second loss in a row fails a sequence. A
        tokenizer that never answered counts against none."""
        if not self._connected:
            return
        for handle in out.unanswered(oldest=oldest):
            sequence = self._sequences.get(handle)
            if sequence is None:
                continue
            if sequence.text.strike() >= MOST_LOST:
                log.warning("a request loses tokenizers", request_id=sequence.context.request_id)
                del self._sequences[handle]
                self._fail(sequence, loses_tokenizers())

    def _apply(self, answer: Detokenized) -> None:
        """Add the answered texts and offsets to the sequences; drop those that have ended. An error fails its sequence,
        but Unavailable makes the stream go to another tokenizer."""
        handles, stops, counts = answer.handles, answer.stops, answer.used
        texts = answer.texts
        if answer.cut or self._begun:
            texts = self._whole_texts(answer)
            handles, stops, counts = handles[: len(texts)], stops[: len(texts)], counts[: len(texts)]
        for handle, kind, call, chars in answer.parts:
            if handle in self._sequences:
                self._sequences[handle].text.add_part(kind, call, chars)
        for handle, tokens in answer.reasoning_tokens:
            if handle in self._sequences:
                self._sequences[handle].text.set_reasoning_tokens(tokens)
        offsets, at = answer.offsets, 0
        find, us = self._sequences.get, answer.row_us
        for handle, text, stop_index, used in zip(handles, texts, stops, counts, strict=True):
            sequence = find(handle)
            if offsets is not None and handle & 1:
                if sequence is not None:
                    sequence.text.add_offsets(offsets[at : at + used])
                at += used
            if sequence is not None and sequence.add_text(text, stop_index, used, us):
                del self._sequences[handle]
                if stop_index >= 0:
                    self._text_ended(sequence)
        for handle, error in answer.failed:
            if isinstance(error, Unavailable):  # the tokenizer's matter, not the request's: another takes it on
                self._refused = True
                continue
            sequence = self._sequences.pop(handle, None)
            if sequence is not None:
                self._fail(sequence, error)

    def _whole_texts(self, answer: Detokenized) -> list[str]:
        """Return the texts of complete rows: a text counts when its tokens do, or another tokenizer would be told wrong
        numbers. The parts of a row whose text is cut are kept until it is complete."""
        texts = list(answer.texts)
        if answer.cut and len(texts) == 1:
            self._begun += texts
            return []
        if texts and self._begun:
            texts[0] = "".join((*self._begun, texts[0]))
            self._begun = []
        if answer.cut:
            self._begun.append(texts.pop())
        return texts

    def _fail_all(self, error: QuireError) -> None:
        """Drop all sequences and fail each."""
        for handle, sequence in list(self._sequences.items()):
            del self._sequences[handle]
            self._fail(sequence, error)

    def _fail(self, sequence: SequenceState, error: QuireError) -> None:
        """Fail the sequence, and report that its text has ended."""
        sequence.fail(error)
        self._text_ended(sequence)
