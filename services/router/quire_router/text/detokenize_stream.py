"""The Detokenize stream of one session with a scheduler: it sends the engine's rows to a tokenizer and receives text.

When the tokenizer dies, hangs or drains, a new stream goes to another tokenizer. The new stream opens every live
sequence again. Rows that come while there is no stream need no queue, because the sequences have their tokens. When a
tokenizer is lost, sequences in messages that it had not answered become suspects (see poison.py).
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

# With these statuses the process may have died, and may have worked on more messages than on the oldest.
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
log = get_logger(__name__)


class DetokenizeStream:
    """`sequences` is the session's table, by handle. The stream removes a sequence from the table when its text has
    ended.

    `text_ended` is called for a sequence whose text ended by a stop string or an error, so that its engine can stop.
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
        # Whether the tokenizer has answered the first message of the stream.
        self._connected = False
        self._refused = False
        # Parts of a row's text that have come, if the text of this row comes in several answers.
        self._begun: list[str] = []

    @property
    def backlog(self) -> int:
        """The number of messages with rows that wait to be sent to the tokenizer."""
        return self._out.backlog

    def open(self, sequence: SequenceState) -> None:
        """Queue a sequence to be opened at the tokenizer; rows may follow. Does nothing while no tokenizer is
        connected, because the next stream opens all sequences."""
        if self._connected:
            self._out.open(sequence)

    def rows(self, handle: bytes, count: bytes, token: bytes, finish: bytes) -> None:
        """Queue the rows of one engine step for the tokenizer. The columns are those of the scheduler's message: int32
        handles, int32 token counts, int32 token ids, and one finish byte per row. Does nothing while no tokenizer is
        connected, because the next stream reads the tokens from the sequences."""
        if self._connected:
            self._out.rows(tb.DetokenizeRequest(handle=handle, count=count, token=token, finish=finish))

    def close(self, handle: int) -> None:
        """Tell the tokenizer that nobody wants the handle's text any more. Does nothing while no tokenizer is
        connected."""
        if self._connected:
            self._out.close(handle)

    async def run(self) -> None:
        """Run one stream after the other until cancelled, each to a tokenizer that is healthy then. When a stream ends,
        mark its tokenizer as lost and wait for a backoff. If no tokenizer is healthy for `--migration-wait-s`, all
        sequences fail."""
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
        """Run one stream to this tokenizer; return the reason for its end. All sequences are opened after the first
        answer; each answer is applied to the sequences. The stream ends if the tokenizer refuses a sequence as
        Unavailable. It is cancelled if the tokenizer is silent for `--tokenizer-timeout-s` while it owes an answer or
        something waits to be sent.

        If the tokenizer dies, this counts against the sequences in unanswered messages. If it hangs, or the call ends
        with another error, only the oldest such message counts. The answer that completes a suspect's open clears the
        suspect. Raises grpc.RpcError if the call ends with an error, and other exceptions if an answer cannot be read
        or applied; these count against no sequence.
        """
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
                if not message.more and (cleared := out.note_answer()) is not None:
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
        """Open all sequences on the stream; sequences with the fewest tokens come first."""
        self._connected = True
        for sequence in sorted(self._sequences.values(), key=lambda sequence: len(sequence.engine.output_ids)):
            out.open(sequence)

    def _suspect(self, out: DetokenizeOutgoing, *, oldest: bool) -> None:
        """Count the lost tokenizer against the sequences in its unanswered messages. With `oldest`, only the oldest
        such message counts, because a tokenizer that hangs works on this message. A sequence fails at its second loss
        in a row, and leaves the session's table. A tokenizer that never answered counts against no sequence."""
        if not self._connected:
            return
        for handle in out.unanswered(oldest=oldest):
            sequence = self._sequences.get(handle)
            if sequence is None:
                continue
            if sequence.text.add_strike() >= MOST_LOST:
                log.warning("a request loses tokenizers", request_id=sequence.context.request_id)
                del self._sequences[handle]
                self._fail(sequence, loses_tokenizers())

    def _apply(self, answer: Detokenized) -> None:
        """Add the answered texts, parts, counts of reasoning tokens and offsets to the sequences. A row whose text goes
        on in the next message is added when its text is complete. Drop the sequences whose text has ended; after a stop
        string, also report that. A sequence with an error fails; but if the error is Unavailable, the stream goes to
        another tokenizer instead."""
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
            if isinstance(error, Unavailable):  # the tokenizer is the cause, so another tokenizer takes the sequence
                self._refused = True
                continue
            sequence = self._sequences.pop(handle, None)
            if sequence is not None:
                self._fail(sequence, error)

    def _whole_texts(self, answer: Detokenized) -> list[str]:
        """Return the texts of the rows that are complete, in order. The last text of an answer that is cut is kept, and
        put before the first text of the next answer. Text and tokens must be counted together, because another
        tokenizer may have to continue from these counts."""
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
        """Drop all sequences, fail each with this error, and report that their texts have ended."""
        for handle, sequence in list(self._sequences.items()):
            del self._sequences[handle]
            self._fail(sequence, error)

    def _fail(self, sequence: SequenceState, error: QuireError) -> None:
        """Fail the sequence, and call `text_ended`, so that its engine stops."""
        sequence.fail(error)
        self._text_ended(sequence)
