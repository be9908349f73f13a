"""LogitControls: the changes of logits that a client may ask for: penalties, biases, allowed and forbidden tokens.

Names and meanings are vLLM's. A sequence without such changes has no LogitControls, so they cost it nothing. The worker
decides the order in which they are applied: see quire_worker.sampling.logits_state.

All sequences of a request repeat its controls on the wire. A list of thousands of ids costs a millisecond and half a
megabyte. So each process parses, checks and writes controls with lists only once, and all sequences share one object.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final
from weakref import WeakValueDictionary

from quire.v1 import common_pb2 as pb
from quire_common.columns import i32, pack_i32
from quire_common.errors import InvalidArgument
from quire_common.request_parameters import BY_NAME, PENALTIES, NumberCodec

# Bounds that keep a Grant of several hundred starts far below what gRPC carries.
MAX_BIASES = BY_NAME["logit_bias"].max_items
MAX_ALLOWED_TOKENS = BY_NAME["allowed_token_ids"].max_items
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 16_384
MAX_BIAS = 100.0
_PENALTIES: Final = NumberCodec(PENALTIES)


@dataclass(slots=True)
class _Derived:
    """Facts about controls that are computed once for all sequences that share them."""

    wire: bytes = b""
    checked: bool = False
    span: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, weakref_slot=True)
class LogitControls:
    """The presence and frequency penalties count tokens of the output; the repetition penalty counts tokens of prompt
    and output. `bad_words` are sequences of token ids that must not occur in the output. `allowed_token_ids` empty: all
    tokens are allowed."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """By token id, ascending."""
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    derived: _Derived = field(default_factory=_Derived, init=False, compare=False, repr=False)

    @property
    def has_lists(self) -> bool:
        """Whether it holds more than three numbers."""
        return bool(self.logit_bias or self.allowed_token_ids or self.bad_words)

    @property
    def token_span(self) -> tuple[int, int]:
        """The lowest and the highest token id that the lists name; (0, 0) where they name none. Computed once."""
        if self.derived.span is None:
            biased = [token for token, _bias in self.logit_bias]
            named = [ids for ids in (biased, self.allowed_token_ids, *self.bad_words) if ids]
            self.derived.span = min(map(min, named), default=0), max(map(max, named), default=0)
        return self.derived.span


NEUTRAL = LogitControls()
# Texts of bad words reach engines as tokens.
_FIELDS: Final = frozenset((*(each.name for each in PENALTIES), "logit_bias", "allowed_token_ids", "bad_words_ids"))
_OTHER_FIELDS: Final = tuple(each.name for each in pb.SamplingParams.DESCRIPTOR.fields if each.name not in _FIELDS)
# By their bytes; an entry goes with the last sequence that holds its controls.
_SHARED: Final[WeakValueDictionary[bytes, LogitControls]] = WeakValueDictionary()


def controls_into_pb(controls: LogitControls, message: pb.SamplingParams) -> None:
    """Write the controls into the message, which has none yet. Those with lists are encoded once for all sequences that
    share them."""
    if not controls.has_lists:
        _write(controls, message)
        return
    if not controls.derived.wire:
        alone = pb.SamplingParams()
        _write(controls, alone)
        controls.derived.wire = alone.SerializeToString(deterministic=True)
    message.MergeFromString(controls.derived.wire)


def controls_from_pb(message: pb.SamplingParams) -> LogitControls | None:
    """Decode the controls; None if all are neutral. Equal controls with lists are one object while any sequence holds
    it. Does not check values. Raises InvalidArgument for a list that is too long, before it builds the list, and for a
    list of ids whose bytes are no multiple of four."""
    if not (message.logit_bias or message.allowed_token_ids or message.bad_words_ids):
        # Most sequences ask for nothing: no object is made to be compared.
        return _read(message) if _PENALTIES.asks(message) else None
    check_counts(len(message.logit_bias), len(message.allowed_token_ids) // 4, len(message.bad_words_ids))
    check_counts(bad_word_tokens=sum(map(len, message.bad_words_ids)) // 4)
    alone = pb.SamplingParams()
    alone.CopyFrom(message)
    for name in _OTHER_FIELDS:
        alone.ClearField(name)
    wire = alone.SerializeToString(deterministic=True)
    shared = _SHARED.get(wire)
    if shared is None:
        shared = _read(message)
        shared.derived.wire = wire
        _SHARED[wire] = shared
    return shared


def _write(controls: LogitControls, message: pb.SamplingParams) -> None:
    """Write all controls into the message."""
    _PENALTIES.into_pb(controls, message)
    for token, bias in controls.logit_bias:
        message.logit_bias[token] = bias
    message.allowed_token_ids = pack_i32(controls.allowed_token_ids)
    message.bad_words_ids.extend(pack_i32(word) for word in controls.bad_words)


def _read(message: pb.SamplingParams) -> LogitControls:
    """Read all controls from the message."""
    return LogitControls(
        **_PENALTIES.from_pb(message),
        logit_bias=tuple(sorted(message.logit_bias.items())),
        allowed_token_ids=tuple(i32(message.allowed_token_ids, "allowed_token_ids").tolist()),
        bad_words=tuple(tuple(i32(word, "bad_words_ids").tolist()) for word in message.bad_words_ids),
    )


def control_values(controls: LogitControls) -> int:
    """Return how many numbers the lists have; the time to check and prepare the controls grows with it."""
    return 2 * len(controls.logit_bias) + len(controls.allowed_token_ids) + sum(map(len, controls.bad_words))


def controls_bytes(controls: LogitControls) -> int:
    """Return an upper bound of the bytes that these controls take in a message."""
    biases, words = len(controls.logit_bias), controls.bad_words
    return 64 + 16 * biases + 4 * len(controls.allowed_token_ids) + sum(8 + 4 * len(word) for word in words)


def check_controls(controls: LogitControls) -> None:
    """Raise InvalidArgument for a value outside its range, an empty bad word, or a list that is too long. Controls that
    have passed are not checked again."""
    if not controls.derived.checked:
        _check(controls)
        controls.derived.checked = True


def _check(controls: LogitControls) -> None:
    """Raise InvalidArgument for a penalty or a bias outside its range, an empty bad word, or a list that is too long.
    Unlike `check_controls`, checks again each time."""
    _PENALTIES.check(controls)
    for token, bias in controls.logit_bias:
        if not abs(bias) <= MAX_BIAS:
            raise InvalidArgument(
                "BAD_SAMPLING_PARAMETER",
                f"logit_bias of token {token} is {bias}.",
                f"Choose biases from -{MAX_BIAS:g} to {MAX_BIAS:g}.",
                param="logit_bias",
            )
    if any(not word for word in controls.bad_words):
        raise InvalidArgument(
            "BAD_SAMPLING_PARAMETER", "bad_words has an empty sequence.", "Leave it out.", param="bad_words"
        )
    check_counts(
        len(controls.logit_bias),
        len(controls.allowed_token_ids),
        len(controls.bad_words),
        sum(map(len, controls.bad_words)),
    )


def check_counts(biases: int = 0, allowed_tokens: int = 0, bad_words: int = 0, bad_word_tokens: int = 0) -> None:
    """Raise InvalidArgument, with the list's name, for a count above its maximum: MAX_BIASES, MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS, or MAX_BAD_WORD_TOKENS of all bad words together."""
    for name, count, most in (
        ("logit_bias", biases, MAX_BIASES),
        ("allowed_token_ids", allowed_tokens, MAX_ALLOWED_TOKENS),
        ("bad_words", bad_words, MAX_BAD_WORDS),
        ("bad_words", bad_word_tokens, MAX_BAD_WORD_TOKENS),
    ):
        if count > most:
            raise InvalidArgument(
                "TOO_MANY_ITEMS", f"{name} has {count} entries, at most {most} are possible.", "Send fewer.", param=name
            )


def check_vocabulary(controls: LogitControls, vocab_size: int) -> None:
    """Raise InvalidArgument if biases, allowed tokens or bad words name a token id outside 0 to `vocab_size` - 1; the
    error names the list and the id."""
    lowest, highest = controls.token_span
    if lowest >= 0 and highest < vocab_size:
        return
    for name, tokens in (
        ("logit_bias", [token for token, _bias in controls.logit_bias]),
        ("allowed_token_ids", list(controls.allowed_token_ids)),
        ("bad_words", [token for word in controls.bad_words for token in word]),
    ):
        wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise InvalidArgument(
                "TOKEN_OUT_OF_RANGE",
                f"{name} names token id {wrong}, which is not in the vocabulary of {vocab_size}.",
                f"Send ids from 0 to {vocab_size - 1}.",
                param=name,
            )
