"""OutputBuffer: the outputs of a step for each session, as columns: rows of tokens, and notes on requests that were
admitted or have ended.

Tokens are never objects of their own. This module does not know the wire format; `session_wire.py` encodes the outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire_common.columns import NO_I32, NO_U8
from quire_common.credit import LogprobColumns, PromptLogprobs
from quire_common.credit.logprobs import join_logprobs
from quire_common.finish import FinishReason

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire_common.errors import QuireError
    from quire_common.ticket import Ticket
    from quire_scheduler.core.timing import Hop


class AdmittedNote(NamedTuple):
    """A request took its first slot. Other engines may pull its pages with the `ticket`, if there is one."""

    handle: int
    attempt: int
    cached_tokens: int
    ticket: Ticket | None = None


class FinishedNote(NamedTuple):
    """A request ended without an error. Its finish reason is in a row of its own. `stop_token_id` is -1 if there is
    none."""

    handle: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    stop_token_id: int
    hops: list[Hop]


class PrefilledNote(NamedTuple):
    """A prefill-only request has sampled its token and has ended."""

    handle: int
    hops: list[Hop]


class PulledNote(NamedTuple):
    """The note that the pull of a request is over: `pages` of the `wanted` pages came. `error` is the reason if some
    are missing. `near`: the pages came from a worker on the same host."""

    handle: int
    pages: int
    wanted: int
    us: int
    error: QuireError | None
    near: bool = False


class FailedNote(NamedTuple):
    """A request failed; nothing more follows for it."""

    handle: int
    error: QuireError


@dataclass(slots=True)
class SessionOutputs:
    """The outputs of one session: rows in order, then notes. A handle may have several rows if a Report told of several
    steps."""

    session: int
    handle: NDArray[np.int32]
    count: NDArray[np.int32]
    token: NDArray[np.int32]
    finish: NDArray[np.uint8]
    logprobs: LogprobColumns | None = None
    admitted: list[AdmittedNote] = field(default_factory=list)
    finished: list[FinishedNote] = field(default_factory=list)
    failed: list[FailedNote] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    prefilled: list[PrefilledNote] = field(default_factory=list)
    pulled: list[PulledNote] = field(default_factory=list)


@dataclass(slots=True)
class Rows:
    """Rows of several sessions."""

    session: NDArray[np.int32]
    handle: NDArray[np.int32]
    count: NDArray[np.int32]
    token: NDArray[np.int32]
    finish: NDArray[np.uint8]
    logprobs: LogprobColumns | None

    def select(self, keep: NDArray[np.bool_]) -> Rows:
        """Return the rows where `keep` holds, with their tokens and logprobs; these rows themselves if all are kept.
        Logprobs are None if none are left."""
        if keep.all():
            return self
        tokens = np.repeat(keep, self.count)
        logprobs = None if self.logprobs is None else self.logprobs.select(tokens) or None
        return Rows(
            self.session[keep],
            self.handle[keep],
            self.count[keep],
            self.token[tokens],
            self.finish[keep],
            logprobs or None,
        )


class OutputBuffer:
    """Collects the outputs for the sessions until `take_outputs`."""

    def __init__(self) -> None:
        self._ends: dict[int, list[tuple[int, int]]] = {}
        self._outputs: dict[int, SessionOutputs] = {}

    def add_rows(self, rows: Rows) -> None:
        """Add the rows of a Report to the outputs of their sessions."""
        if len(rows.handle):
            for session, part in split(rows):
                _append(self._of(session), part)

    def admitted(self, session: int, note: AdmittedNote) -> None:
        """Add the note of a request that took its first slot."""
        self._of(session).admitted.append(note)

    def finished(self, session: int, note: FinishedNote) -> None:
        """Add the note of a request that ended; its last row was or will be added by `add_rows`."""
        self._of(session).finished.append(note)

    def prefilled(self, session: int, note: PrefilledNote) -> None:
        """Add the note of a request that has been prefilled; the row of its token was or will be added by
        `add_rows`."""
        self._of(session).prefilled.append(note)

    def pulled(self, session: int, note: PulledNote) -> None:
        """Add the note of a request that needs its ticket no more."""
        self._of(session).pulled.append(note)

    def aborted(self, session: int, note: FinishedNote) -> None:
        """Add the note of a request that was aborted, and a row without tokens that ends it."""
        self._of(session).finished.append(note)
        self._ends.setdefault(session, []).append((note.handle, FinishReason.ABORT))

    def failed(self, session: int, note: FailedNote) -> None:
        """Add the note of a request that failed."""
        self._of(session).failed.append(note)

    def prompt_logprobs(self, session: int, chunk: PromptLogprobs) -> None:
        """Add logprobs of some of a prompt's tokens. The chunk's owner is the request's handle."""
        self._of(session).prompt_logprobs.append(chunk)

    def forget(self, session: int) -> None:
        """Drop the outputs of a session that nobody listens to any more."""
        self._outputs.pop(session, None)
        self._ends.pop(session, None)

    def take_outputs(self) -> list[SessionOutputs]:
        """Return the outputs since the last call, one entry per session that has any, and clear the buffer. The rows
        that end aborted requests come after a session's other rows."""
        if not self._outputs:
            return []
        for session, ends in self._ends.items():
            into = self._of(session)
            into.handle = np.concatenate([into.handle, np.array([e[0] for e in ends], np.int32)])
            into.finish = np.concatenate([into.finish, np.array([e[1] for e in ends], np.uint8)])
            into.count = np.concatenate([into.count, np.zeros(len(ends), np.int32)])
        outputs, self._outputs, self._ends = self._outputs, {}, {}
        return list(outputs.values())

    def _of(self, session: int) -> SessionOutputs:
        """Return the session's outputs in the buffer, which are created empty if there are none."""
        outputs = self._outputs.get(session)
        if outputs is None:
            outputs = self._outputs[session] = SessionOutputs(session, NO_I32, NO_I32, NO_I32, NO_U8)
        return outputs


def without_handles(out: SessionOutputs, handles: set[int]) -> SessionOutputs:
    """Return a copy of the outputs without the rows and finished notes of these handles. Other notes stay."""
    keep = np.isin(out.handle, list(handles), invert=True)
    rows = Rows(np.zeros(len(keep), np.int32), out.handle, out.count, out.token, out.finish, out.logprobs).select(keep)
    finished = [note for note in out.finished if note.handle not in handles]
    return replace(
        out,
        handle=rows.handle,
        count=rows.count,
        token=rows.token,
        finish=rows.finish,
        logprobs=rows.logprobs,
        finished=finished,
    )


def split(rows: Rows) -> list[tuple[int, Rows]]:
    """Split the rows, of which there is at least one, by session. Returns pairs of a session and its rows. If all rows
    belong to one session, as is usual, nothing is copied."""
    first = rows.session[0]
    if not np.count_nonzero(rows.session != first):
        return [(int(first), rows)]
    return [(int(session), rows.select(rows.session == session)) for session in np.unique(rows.session)]


def _append(into: SessionOutputs, rows: Rows) -> None:
    """Append the rows, with their tokens and logprobs, to the session's outputs in place."""
    if not len(into.handle):
        into.handle, into.count, into.token = rows.handle, rows.count, rows.token
        into.finish, into.logprobs = rows.finish, rows.logprobs
        return
    into.logprobs = join_logprobs([(0, into.logprobs), (len(into.token), rows.logprobs)])
    into.handle = np.concatenate([into.handle, rows.handle])
    into.count = np.concatenate([into.count, rows.count])
    into.token = np.concatenate([into.token, rows.token])
    into.finish = np.concatenate([into.finish, rows.finish])
