"""The session with one scheduler: opens the Session stream, sends messages on it, and ends it. session_codec.py reads
the scheduler's messages, and session_reducer.py applies them.

This module knows nothing of clients; a sequence learns of its end from the reducer or from its Detokenize stream.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import grpc

from quire_common.cancellation import is_cancelled
from quire_common.errors import Internal, Unavailable, from_rpc_error
from quire_router import metrics
from quire_router.replicas.session_codec import session_step
from quire_router.replicas.session_outgoing import SessionOutgoing
from quire_router.replicas.session_reducer import SessionReducer
from quire_router.sequences.engine_failure import SESSION_TOO_SLOW

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quire.v1 import scheduler_pb2_grpc
    from quire_common.errors import QuireError
    from quire_common.ticket import Ticket
    from quire_router.kv_transfer.reservation import Reservation
    from quire_router.placement.replica_table import ReplicaRow
    from quire_router.sequences.engine_failure import EngineFailure
    from quire_router.sequences.sequence_state import SequenceState
    from quire_router.text.detokenize_stream import DetokenizeStream
    from quire_router.watchdog import Watch, Watchdog

    # Arguments: the sequences of a holder by handle, and the function to call for a sequence whose text ends before its
    # engine does.
    MakeDetokenizer = Callable[[dict[int, SequenceState], Callable[[SequenceState], None]], DetokenizeStream]

# A healthy scheduler welcomes at once.
_WELCOME_TIMEOUT_S = 10.0
# A session is lost only after this many heartbeats are missing.
_HEARTBEATS = 3
# The error code for a gRPC status that gRPC itself has made, and not a service; see from_rpc_error.
_CUT = "PEER_UNAVAILABLE"


class Session:
    """The session with one scheduler. It exists as long as its replica, and opens one Session stream after the other.

    `sequences` has the sequences at the scheduler, by handle; the Detokenize stream shares this table. `reservations`
    are places at the scheduler for sequences that another engine still prefills. `lost` is called for every sequence
    that the scheduler has dropped before its end. `life` counts the streams. `row` gets the measured speeds of prefill
    and of KV pulls.
    """

    def __init__(
        self,
        instance: str,
        address: str,
        stub: scheduler_pb2_grpc.SchedulerStub,
        make_detokenizer: MakeDetokenizer,
        router_id: str,
        watchdog: Watchdog,
        timeout_s: float,
        lost: Callable[[SequenceState, EngineFailure], None],
        row: ReplicaRow,
    ) -> None:
        self.instance = instance
        self.address = address
        self.sequences: dict[int, SequenceState] = {}
        self.reservations: dict[int, Reservation] = {}
        self.life = 1
        self.detokenizer = make_detokenizer(self.sequences, self._text_ended)
        self.open = False
        self._stub = stub
        self._router_id = router_id
        self._watchdog = watchdog
        self._timeout_s = timeout_s
        self._reducer = SessionReducer(self, self.sequences, self.reservations, self.detokenizer, lost, row)
        self._out = SessionOutgoing(router_id, self._wanted)

    def submit(self, sequence: SequenceState) -> None:
        """Make this session the holder of a sequence, record the run in its placement, queue it for the scheduler, and
        open it on the Detokenize stream. Call only while `open`."""
        sequence.hold(self)
        sequence.placement.begin_run(self.instance, sequence.engine.tokens)
        self.sequences[sequence.handle] = sequence
        # The submit goes first, because the tokenizer need not have opened the sequence before the first token comes.
        self._out.submit(sequence.handle, sequence)
        self.detokenizer.open(sequence)

    def reserve(self, reservation: Reservation) -> None:
        """Send a reservation to the scheduler; only while `open`."""
        self.reservations[reservation.handle] = reservation
        self._out.submit(reservation.handle, reservation)

    def cancel(self, reservation: Reservation) -> None:
        """Drop a reservation here and at the scheduler. Idempotent."""
        if self.reservations.pop(reservation.handle, None) is not None:
            self._abort(reservation.handle)

    def adopt(self, sequence: SequenceState) -> None:
        """Turn a reservation into the sequence that has the reservation's handle: make this session its holder, record
        the run in its placement, and open it on the Detokenize stream. Nothing is sent to the scheduler, which has the
        request already."""
        del self.reservations[sequence.handle]
        sequence.hold(self)
        sequence.placement.begin_run(self.instance, sequence.engine.tokens)
        self.sequences[sequence.handle] = sequence
        self.detokenizer.open(sequence)

    def hand_over_ticket(self, handle: int, ticket: Ticket) -> None:
        """Tell the scheduler where a reservation's pages are."""
        self._out.hand_over(handle, ticket, b"", give_up=False)

    def hand_over_token(self, handle: int, token: bytes, *, give_up: bool) -> None:
        """Tell the scheduler which tokens (int32 bytes) the prefill side sampled. `give_up`: there is nothing more to
        pull."""
        self._out.hand_over(handle, None, token, give_up=give_up)

    def renew_transfers(self, transfer_ids: Sequence[bytes]) -> None:
        """Renew the leases of these transfers at the scheduler, while the session is open."""
        if self.open:
            self._out.renew_transfers(transfer_ids)

    def release_transfer(self, transfer_id: bytes) -> None:
        """Let the scheduler take the transfer's pages back, while the session is open."""
        if self.open:
            self._out.release_transfer(transfer_id)

    def abort(self, sequence: SequenceState) -> None:
        """Stop a sequence at the scheduler (while the session is open) and at the tokenizer, and release its load;
        later messages about the sequence are ignored. Idempotent."""
        if self.sequences.pop(sequence.handle, None) is not None:
            sequence.placement.release_load()
            self.detokenizer.close(sequence.handle)
            self._abort(sequence.handle)

    async def run(self, model: str, opened: Callable[[], None]) -> None:
        """Open the stream, call `opened` at the scheduler's welcome, and apply the scheduler's messages until the
        stream ends. `open` holds from the welcome to the end. Returns if the scheduler ends the stream. `model` is the
        name of the scheduler's model, for metrics. Raises QuireError if the stream breaks, if a message to the
        scheduler cannot be made, if the welcome takes ten seconds, or if the scheduler is silent longer than its
        heartbeats allow. Errors of `session_step` for a malformed message pass on.

        When the stream ends, all sequences and reservations of the session are lost. No message of this stream is
        applied later, because its call has ended and its handles are out of the tables.
        """
        self._out = SessionOutgoing(self._router_id, self._wanted)
        self._reducer.serve(model)
        call = self._stub.Session(self._out.messages())
        watch = self._watchdog.watch(_WELCOME_TIMEOUT_S, call.cancel)
        reason, unreachable, heard_ns = "session_ended", False, time.monotonic_ns()
        try:
            async for message in call:
                heard_ns = time.monotonic_ns()
                watch.hear()
                if message.HasField("welcome"):
                    watch.set_limit(self._longest_silence_s(message.welcome.heartbeat_ms))
                    self.open = True
                    opened()
                self._reducer.apply(session_step(message, self.instance), heard_ns)
        except asyncio.CancelledError:
            if is_cancelled():
                reason = "left"
                raise
            # Only the call was cancelled: by the watchdog, or by gRPC because a message could not be made.
            reason, unreachable = ("silent", True) if watch.expired else ("session_failed", False)
            raise _cut(watch) from None
        except grpc.aio.AioRpcError as error:
            typed = from_rpc_error(error)
            reason = "too_slow" if typed.code == SESSION_TOO_SLOW else "session_lost"
            unreachable = typed.code == _CUT
            raise typed from error
        except Exception:
            reason = "session_failed"
            raise
        finally:
            self._watchdog.drop(watch)
            self.open = False
            self.life += 1
            call.cancel()
            self._out.end()
            if self.sequences:
                metrics.detection.observe((time.monotonic_ns() - heard_ns) / 1e9)
            self._reducer.lose_all(reason, unreachable=unreachable)

    def _longest_silence_s(self, heartbeat_ms: int) -> float:
        """Return how long the scheduler may be silent: the timeout, or three heartbeats if they are longer. The result
        is infinite if the scheduler sends no heartbeats."""
        return max(self._timeout_s, _HEARTBEATS * heartbeat_ms / 1000) if heartbeat_ms else float("inf")

    def _wanted(self, handle: int) -> bool:
        return handle in self.sequences or handle in self.reservations

    def _text_ended(self, sequence: SequenceState) -> None:
        """Abort the sequence at the scheduler, if the session is open: the tokenizer has found a stop string, or has
        failed, before the engine ended."""
        self._abort(sequence.handle)

    def _abort(self, handle: int) -> None:
        if self.open:
            self._out.abort(handle)


def _cut(watch: Watch) -> QuireError:
    """Return the error for a call that the router's side has cancelled: the watchdog, because the scheduler was silent,
    or gRPC, because a message could not be made."""
    if watch.expired:
        message = f"The scheduler said nothing for {watch.quiet_s:.1f} s."
        return Unavailable("SCHEDULER_SILENT", message, "See its log; its process may hang.")
    return Internal("SESSION_CUT", "A message to the scheduler could not be made.", "Report it with the router's log.")
