"""The open requests of one Detokenize stream, by handle. Each request is opened, advanced step by step, and closed.

An error of one request is reported in the answer, and the stream goes on. Rows whose handles are not open are skipped:
the engine may send further rows before it learns that the tokenizer has found a stop string. This module knows nothing
of protobuf.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from quire_common.columns import NO_I32
from quire_common.errors import InvalidArgument, Overloaded, QuireError, TooLarge, Unavailable
from quire_tokenizer.detokenize.stop_matcher import stop_strings
from quire_tokenizer.detokenize.text_stream import StopRules, TextStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from quire_tokenizer.output_parsing.answer_parsers import ParseOptions
    from quire_tokenizer.output_parsing.parts import Part
    from quire_tokenizer.vocabulary import Vocabulary

    Ints = NDArray[np.int32]

# Prior tokens that are decoded in one turn of the event loop: in 2 ms, or in some 50 ms with the library's decoder.
_TURN_TOKENS = 2048
_LONG_CHARS = 16_384


@dataclass(frozen=True)
class StreamLimits:
    """The bounds of one stream, and of the options of each request."""

    max_handles: int
    max_stop_strings: int
    max_stop_chars: int
    max_stop_token_ids: int
    max_token_ids: int


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request's options. `on_end` gets `trace` when the request ends."""

    handle: int
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    prior_ids: Ints = field(default_factory=lambda: NO_I32)
    more_prior: bool = False
    further: bool = False
    chars_sent: int = 0
    min_tokens: int = 0
    want_offsets: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    parsing: ParseOptions | None = None
    trace: Any = None


@dataclass(frozen=True, slots=True)
class TokenRows:
    """One engine step. All columns have one value per row, except `token`, which has the tokens of all rows one after
    another."""

    handle: Ints
    count: Ints
    token: Ints
    finish: NDArray[np.uint8]


@dataclass(slots=True)
class StepText:
    """The answer to one engine step. `handle`, `text`, `stop_index` and `used` have one value per row. `offsets` has
    the offsets of the rows whose requests want them."""

    handle: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    stop_index: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    offset_handles: list[int] = field(default_factory=list)
    """The handles of the rows that have offsets."""
    errors: list[tuple[int, QuireError]] = field(default_factory=list)
    parts: list[tuple[int, Part]] = field(default_factory=list)
    """Parts of the texts of requests that are parsed, with their handles."""
    reasoning_tokens: list[tuple[int, int]] = field(default_factory=list)
    """(handle, number of reasoning tokens so far) for each request whose number has grown."""

    def add_row(self, handle: int, text: str, stop_index: int, used: int) -> None:
        """Append one request's row: its text, the index of its stop string or -1, and the number of its tokens that
        count."""
        self.handle.append(handle)
        self.text.append(text)
        self.stop_index.append(stop_index)
        self.used.append(used)

    def add_offsets(self, offsets: Sequence[int]) -> None:
        """Append the offsets of the row that was added last."""
        self.offsets += offsets


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """Data about a request that has ended, for traces and statistics."""

    trace: Any
    start_ns: int
    end_ns: int
    tokens: int
    chars: int
    stopped_by_string: bool
    parsers: tuple[tuple[str, str], ...] = ()
    """Kind and name of each parser of its text."""
    parse_failures: Sequence[str] = ()


@dataclass(slots=True)
class _Open:
    stream: TextStream
    trace: Any
    start_ns: int
    reasoning_tokens: int = 0


class Detokenizer:
    """The requests of one stream. `on_end` is called for every request that ends by a finish or by a stop string."""

    def __init__(self, vocabulary: Vocabulary, limits: StreamLimits, on_end: Callable[[EndedRequest], None]) -> None:
        self._vocabulary = vocabulary
        self._limits = limits
        self._on_end = on_end
        self._open: dict[int, _Open] = {}
        # Requests that are not open yet, because more of their prior tokens are to come.
        self._replaying: dict[int, _Open] = {}
        # The handles whose next text is long, because it includes text of prior tokens.
        self._owing: set[int] = set()
        # Set when the process is about to end: open requests may finish, and no new request may start.
        self._draining = False

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self._draining = True

    def __len__(self) -> int:
        return len(self._open) + len(self._replaying)

    def open(self, request: OpenRequest) -> Iterator[None]:
        """Start a request, or continue a start with `further`: replay its prior tokens, and open it unless `more_prior`
        says that more are to come. Until it is open, its rows are skipped. If the prior tokens leave more than 16,384
        characters to send, `owes_long` is true until they are sent. The caller must iterate to the end: the generator
        yields between pieces of 2,048 tokens, so that the event loop can run other tasks. A `further` open of an
        unknown handle does nothing. Raises the errors of `_check`, TooLarge or InvalidArgument for too many or negative
        ids, and RESUME_MISMATCH if less text was decoded than `chars_sent`. They are raised during the iteration. Then
        this request is not opened, and others, such as an earlier one with its handle, are not affected."""
        opening = self._replaying.pop(request.handle, None) if request.further else self._start(request)
        if opening is None:
            return
        stream, column = opening.stream, request.prior_ids
        if len(column) + stream.fed_tokens > self._limits.max_token_ids:
            raise _too_many_ids(len(column) + stream.fed_tokens, self._limits.max_token_ids)
        if len(column) and int(column.min()) < 0:
            raise _bad_token(int(column.min()))
        for start in range(0, len(column), _TURN_TOKENS):
            if start:
                yield
            stream.replay(column[start : start + _TURN_TOKENS].tolist())
        if request.more_prior:
            self._replaying[request.handle] = opening
            return
        stream.end_replay()
        if stream.backlog_chars > _LONG_CHARS:
            self._owing.add(request.handle)
        self._open[request.handle] = opening

    def _start(self, request: OpenRequest) -> _Open:
        """Check a new request, and make its decoder and text stream, ready for prior tokens. A last token that is an
        EOS token of the model is hidden as a stop token of the request is: if the engine says that it stopped, and not
        with `include_stop`. The request is not open yet. Raises the errors of `_check`."""
        self._check(request)
        decoder = self._vocabulary.decoder(
            skip_special_tokens=request.skip_special_tokens,
            spaces_between_special_tokens=request.spaces_between_special_tokens,
            parsing=request.parsing,
        )
        stream = TextStream(
            decoder,
            StopRules(
                stop_strings(request.stop) if request.stop else None,
                request.stop_token_ids | self._vocabulary.eos_ids,
                request.include_stop,
                request.min_tokens,
            ),
            want_offsets=request.want_offsets,
        )
        stream.begin_replay(request.chars_sent)
        return _Open(stream, request.trace, time.time_ns())

    def step(self, rows: TokenRows, answer: StepText) -> None:
        """Advance the requests of these rows, and append their text, offsets, parts and counts to `answer`. Close
        requests that finish or match a stop string, and call `on_end`. A negative token id closes its request with an
        error in `answer`, without a row or a call of `on_end`. Rows whose handles are not open are skipped. Raises
        BAD_COLUMN, before anything is done, if the counts contradict the tokens."""
        counts, tokens = rows.count.tolist(), rows.token.tolist()
        if sum(counts) != len(tokens) or (counts and min(counts) < 0):
            raise bad_rows(sum(counts), len(tokens))
        suspicious = bool(tokens) and min(tokens) < 0
        position, opened = 0, self._open
        for handle, count, finish in zip(rows.handle.tolist(), counts, rows.finish.tolist(), strict=True):
            ids = tokens[position : position + count]
            position += count
            request = opened.get(handle)
            if request is None:
                continue
            if suspicious and min(ids, default=0) < 0:
                del opened[handle]
                self._owing.discard(handle)
                answer.errors.append((handle, _bad_token(min(ids))))
                continue
            stream = request.stream
            text, stop_index, used = stream.advance(ids, finish)
            answer.handle.append(handle)
            answer.text.append(text)
            answer.stop_index.append(stop_index)
            answer.used.append(used)
            if stream.offsets is not None:
                answer.offsets += stream.offsets
                answer.offset_handles.append(handle)
            if stream.is_parsed:
                answer.parts += [(handle, part) for part in stream.take_parts(len(text))]
                if stream.reasoning_tokens != request.reasoning_tokens:
                    request.reasoning_tokens = stream.reasoning_tokens
                    answer.reasoning_tokens.append((handle, request.reasoning_tokens))
            if finish or stop_index >= 0:
                del opened[handle]
                self._ended(request, stopped_by_string=stop_index >= 0)

    @property
    def owes_long(self) -> bool:
        """Whether the texts of the next answer may be long although its rows are short. While this is True, call `told`
        for each answer."""
        return bool(self._owing)

    def told(self, answer: StepText) -> None:
        """Note that this answer is about to be sent."""
        self._owing.difference_update(answer.handle)

    def close(self, handles: Sequence[int]) -> None:
        """Forget these requests, if they are open or being replayed. `on_end` is not called for them."""
        self._owing.difference_update(handles)
        for handle in handles:
            self._open.pop(handle, None)
            self._replaying.pop(handle, None)

    def _ended(self, request: _Open, *, stopped_by_string: bool) -> None:
        """Call `on_end` with the trace, times, counts and parsers of a request that has ended."""
        stream = request.stream
        self._on_end(
            EndedRequest(
                request.trace,
                request.start_ns,
                time.time_ns(),
                stream.used_tokens,
                stream.chars,
                stopped_by_string,
                stream.parsers,
                stream.parse_failures,
            )
        )

    def _check(self, request: OpenRequest) -> None:
        """Raise Unavailable if the process drains, and Overloaded for too many handles. Raise TooLarge for too many
        stop strings or stop ids, or too long a stop string. Raise InvalidArgument for a handle in use, or an empty stop
        string."""
        limits = self._limits
        if self._draining:
            raise Unavailable(
                "TOKENIZER_DRAINING", "This tokenizer is about to stop.", "Use another.", retry_after_s=1.0
            )
        if request.handle in self._open or request.handle in self._replaying:
            raise InvalidArgument("HANDLE_IN_USE", f"Handle {request.handle} is open.", "Use another, or close it.")
        if len(self) >= limits.max_handles:
            raise Overloaded(
                "TOO_MANY_HANDLES",
                f"{len(self)} requests are open on this stream.",
                "Open another stream, or retry when some are done.",
                retry_after_s=1.0,
            )
        if len(request.stop) > limits.max_stop_strings:
            message = f"{len(request.stop)} stop strings; at most {limits.max_stop_strings} are accepted."
            raise TooLarge("TOO_MANY_STOP_STRINGS", message, "Send fewer.", param="stop")
        if any(len(stop) > limits.max_stop_chars for stop in request.stop):
            message = f"A stop string has more than {limits.max_stop_chars} characters."
            raise TooLarge("STOP_STRING_TOO_LONG", message, "Send a shorter one.", param="stop")
        if not all(request.stop):
            raise InvalidArgument("EMPTY_STOP_STRING", "A stop string is empty.", "Leave it out.", param="stop")
        if len(request.stop_token_ids) > limits.max_stop_token_ids:
            message = f"{len(request.stop_token_ids)} stop token ids; at most {limits.max_stop_token_ids} are accepted."
            raise TooLarge("TOO_MANY_STOP_TOKENS", message, "Send fewer.", param="stop_token_ids")


def bad_rows(counted: int, came: int) -> InvalidArgument:
    """Return the error of rows whose counts do not add up to the number of tokens."""
    return InvalidArgument(
        "BAD_COLUMN", f"The rows count {counted} tokens, but {came} were sent.", "Send columns that agree."
    )


def _too_many_ids(count: int, most: int) -> TooLarge:
    message = f"{count} prior ids; at most {most} are accepted."
    return TooLarge("TOO_MANY_TOKEN_IDS", message, "Start the request anew.", param="prior_ids")


def _bad_token(token_id: int) -> InvalidArgument:
    return InvalidArgument("BAD_TOKEN_ID", f"{token_id} is not a token id.", "Send ids from 0 up.", param="token_ids")
