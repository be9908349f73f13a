"""A sequence's logits processor state as one array of int32, which the device reads in place and keeps up to date
itself.

The array has the contents of `LogitsState`, without logits processors and the repetition rule, for a device that cannot
run Python between two steps: a header, then sections at the offsets that the header names. Float32 values are stored as
their bits. The device adds each token that it is fed to four sections: the known ids, their counts, the ring of the
output's last tokens, and the state of the thinking. Nothing else changes, apart
from the header's numbers of these.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Final

import numpy as np

from quire_common.logit_controls import NEUTRAL
from quire_common.request_parameters import PENALTIES
from quire_worker.sampling.thinking_track import ThinkingTrack, fallbacks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quire_common.logit_controls import LogitControls
    from quire_common.sequence import Sequence
    from quire_worker.arrays import Int32

_HEADER: Final[Mapping[str, str]] = {
    "counting": "1: penalties are asked, so tokens are counted",
    "known": "distinct tokens of prompt and output; changes",
    "written": "tokens of the output; changes",
    **{each.name: "the number, as float32" for each in PENALTIES},
    "biases": "how many there are",
    "bias_at": "the biases' ids, then as many amounts",
    "masked": "1: only tokens of the mask may be drawn",
    "mask_at": "a bit for every token of the vocabulary, the lowest of a word first",
    "words": "how many bad words there are",
    "words_at": "where in the state each bad word's ids begin, and where the last one's end: `words` + 1 offsets",
    "ring": "as many tokens as the longest bad word has before its last",
    "ring_at": "the output's last tokens, token number n at n % ring",
    "capacity": "ids that there is room for",
    "ids_at": "the ids, of which `known` are there, then as many counts of the output; both change",
    "budget": "tokens that it may think; -1: no budget",
    "spent": "tokens since the start mark; -1: not thinking; changes, as the next two",
    "started": "tokens of the start mark with which the sequence ends",
    "ended": "the same of the end mark",
    "starts": "tokens of the start mark",
    "starts_at": "these, then as many fallbacks (see thinking_track)",
    "ends": "tokens of the end mark",
    "ends_at": "these, then as many fallbacks",
}
"""The header's numbers, in order. A penalty is there because the table of request parameters has it."""
OFFSETS: Final[Mapping[str, int]] = {name: offset for offset, name in enumerate(_HEADER)}
AT: Final = SimpleNamespace(**OFFSETS)
"""OFFSETS as attributes."""
HEADER: Final = len(_HEADER)
# A step that was launched before the end was known feeds one token more.
_SPARE = 4


def packed_state(sequence: Sequence, vocab_size: int, room: int | None = None) -> Int32:
    """Return the state of a sequence that starts, as int32 words: the header, then biases, mask, bad words, last
    tokens, thinking marks, and ids with counts. Its output ids are those that it had before.

    `room` is the number of new token ids that the state can count; None: enough for all possible ids. Without
    penalties, it has no ids.
    """
    controls = sequence.sampling.controls or NEUTRAL
    counting = any(getattr(controls, each.name) != each.default for each in PENALTIES)
    ids, counts, capacity = _known_tokens(sequence, vocab_size, room) if counting else (_NONE, _NONE, 0)
    ring = max((len(word) for word in controls.bad_words), default=1) - 1
    written = len(sequence.output_ids)
    mask = _mask(controls.allowed_token_ids, vocab_size)
    header = np.zeros(HEADER, np.int32)
    sections: list[Int32] = [header]
    end = HEADER

    def place(*parts: Int32) -> int:
        """Append parts as the next section, and return the section's offset."""
        nonlocal end
        begin = end
        sections.extend(parts)
        end += sum(map(len, parts))
        return begin

    header[AT.counting], header[AT.known], header[AT.written] = counting, len(ids), written
    _set_penalties(header, controls)
    header[AT.biases], header[AT.words] = len(controls.logit_bias), len(controls.bad_words)
    header[AT.masked] = len(mask) > 0
    header[AT.bias_at] = place(
        np.array([token for token, _ in controls.logit_bias], np.int32),
        np.array([bias for _, bias in controls.logit_bias], np.float32).view(np.int32),
    )
    header[AT.mask_at] = place(mask)
    lengths = np.cumsum([0, *map(len, controls.bad_words)], dtype=np.int32)
    header[AT.words_at] = place((end + len(lengths) + lengths).astype(np.int32))
    place(np.array([token for word in controls.bad_words for token in word], np.int32))
    last = np.zeros(ring, np.int32)
    for number in range(max(0, written - ring), written):
        last[number % ring] = sequence.output_ids[number]
    header[AT.ring], header[AT.ring_at] = ring, place(last)
    header[AT.budget] = -1
    if sequence.thinking is not None:
        budget = sequence.thinking
        track = ThinkingTrack(budget, sequence.prompt_ids, sequence.output_ids.tolist())
        header[AT.budget], header[AT.spent] = budget.max_tokens, track.spent
        header[AT.started], header[AT.ended] = track.started, track.ended
        marks = (AT.starts, AT.starts_at, budget.start_ids), (AT.ends, AT.ends_at, budget.end_ids)
        for count, begin, mark in marks:
            header[count] = len(mark)
            header[begin] = place(np.array((*mark, *fallbacks(mark)), np.int32))
    unused = np.zeros(capacity - len(ids), np.int32)
    header[AT.capacity], header[AT.ids_at] = capacity, place(ids, unused, counts, unused)
    return np.concatenate(sections)


_NONE: Int32 = np.empty(0, np.int32)


def forbidding_state(vocab_size: int) -> Int32:
    """Return a state that forbids every token, whatever tokens are fed. Any number of sequences may share it."""
    header = np.zeros(HEADER, np.int32)
    _set_penalties(header, NEUTRAL)
    header[[AT.bias_at, AT.mask_at, AT.words_at, AT.ring_at, AT.ids_at, AT.starts_at, AT.ends_at]] = HEADER
    header[AT.masked], header[AT.budget] = 1, -1
    return np.concatenate([header, np.zeros(-(-vocab_size // 32), np.int32)])


def _set_penalties(header: Int32, controls: LogitControls) -> None:
    """Write the penalties into the header, as the bits of float32."""
    numbers = header.view(np.float32)
    for each in PENALTIES:
        numbers[OFFSETS[each.name]] = getattr(controls, each.name)


def _known_tokens(sequence: Sequence, vocab_size: int, room: int | None) -> tuple[Int32, Int32, int]:
    """Return the distinct ids of prompt and output, how often each is in the output, and for how many ids there is
    room."""
    ids = np.unique(np.concatenate([sequence.prompt_ids, sequence.output_ids]).astype(np.int32))
    counts = np.zeros(len(ids), np.int32)
    np.add.at(counts, np.searchsorted(ids, sequence.output_ids), 1)
    most = most_ids(sequence, len(ids), vocab_size)
    return ids, counts, most if room is None else min(most, len(ids) + room)


def most_ids(sequence: Sequence, known: int, vocab_size: int) -> int:
    """Return how many distinct ids a sequence may have at its end, if it starts with `known`: one more for each new
    token, and four to spare, up to the vocabulary."""
    return max(known, min(vocab_size, known + sequence.stop.max_tokens + _SPARE))


def _mask(allowed: tuple[int, ...], vocab_size: int) -> Int32:
    """Return int32 words with one bit for each token of the vocabulary, the lowest first, 1 if it is allowed. Empty if
    `allowed` is empty, since then all are."""
    if not allowed:
        return _NONE
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
