"""What a sequence asks of its logits as one array of int32, which a device reads in place and keeps up to date itself.

It says what `RowControls` says, for those who cannot run Python between two steps: a header, then sections at the
offsets that the header names. Float32 values are stored by their bits. The device adds each token that it is fed to the
known ids, to their counts, to the ring of the output's last tokens and to what it knows of the thinking; everything
else stays as it was made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from quire_common.logit_controls import NEUTRAL
from quire_worker.sampling.thinking_track import ThinkingTrack, fallbacks

if TYPE_CHECKING:
    from quire_common.sequence import Sequence
    from quire_worker.arrays import Int32

# Places in the header.
COUNTING: Final = 0
"""1: penalties are asked, so tokens are counted."""
KNOWN: Final = 1
"""Distinct tokens of prompt and output; changes."""
WRITTEN: Final = 2
"""Tokens of the output; changes."""
REPETITION: Final = 3
FREQUENCY: Final = 4
PRESENCE: Final = 5
BIASES: Final = 6
BIAS_AT: Final = 7
"""BIASES ids, then as many amounts."""
MASKED: Final = 8
"""1: only tokens of the mask may be drawn."""
MASK_AT: Final = 9
"""A bit for every token of the vocabulary, the lowest of a word first."""
WORDS: Final = 10
WORDS_AT: Final = 11
"""Where each bad word's ids begin, and where the last one's end: WORDS + 1 places in the sheet."""
RING: Final = 12
RING_AT: Final = 13
"""The output's last RING tokens, token number n at n % RING: as many as the longest bad word has before its last."""
CAPACITY: Final = 14
IDS_AT: Final = 15
"""CAPACITY ids, of which KNOWN are there, then as many counts of the output; both change."""
BUDGET: Final = 16
"""Tokens that it may think; -1: no budget."""
SPENT: Final = 17
"""Tokens since the start mark; -1: not thinking; changes, as the next two."""
STARTED: Final = 18
"""Tokens of the start mark with which the sequence ends."""
ENDED: Final = 19
"""The same of the end mark."""
STARTS: Final = 20
STARTS_AT: Final = 21
"""STARTS tokens of the start mark, then as many fallbacks (see thinking_track)."""
ENDS: Final = 22
ENDS_AT: Final = 23
HEADER: Final = 24
# A step that was launched before the end was known feeds one token more.
_SPARE = 4


def packed_state(sequence: Sequence, vocab_size: int, room: int | None = None) -> Int32:
    """The state of a sequence that starts, its output ids being those that it had before. `room`: new tokens that it
    can count; None: all that may come. The ids and their counts are its last section."""
    controls = sequence.sampling.controls or NEUTRAL
    penalties = (controls.repetition_penalty, controls.frequency_penalty, controls.presence_penalty)
    counting = penalties != (1.0, 0.0, 0.0)
    ids, counts, capacity = _known_tokens(sequence, vocab_size, room) if counting else (_NONE, _NONE, 0)
    ring = max((len(word) for word in controls.bad_words), default=1) - 1
    written = len(sequence.output_ids)
    mask = _mask(controls.allowed_token_ids, vocab_size)
    header = np.zeros(HEADER, np.int32)
    sections: list[Int32] = [header]
    end = HEADER

    def place(*parts: Int32) -> int:
        nonlocal end
        begin = end
        sections.extend(parts)
        end += sum(map(len, parts))
        return begin

    header[COUNTING], header[KNOWN], header[WRITTEN] = counting, len(ids), written
    header[REPETITION : PRESENCE + 1] = np.array(penalties, np.float32).view(np.int32)
    header[BIASES], header[MASKED], header[WORDS] = len(controls.logit_bias), len(mask) > 0, len(controls.bad_words)
    header[BIAS_AT] = place(
        np.array([token for token, _ in controls.logit_bias], np.int32),
        np.array([bias for _, bias in controls.logit_bias], np.float32).view(np.int32),
    )
    header[MASK_AT] = place(mask)
    lengths = np.cumsum([0, *map(len, controls.bad_words)], dtype=np.int32)
    header[WORDS_AT] = place((end + len(lengths) + lengths).astype(np.int32))
    place(np.array([token for word in controls.bad_words for token in word], np.int32))
    last = np.zeros(ring, np.int32)
    for number in range(max(0, written - ring), written):
        last[number % ring] = sequence.output_ids[number]
    header[RING], header[RING_AT] = ring, place(last)
    header[BUDGET] = -1
    if sequence.thinking is not None:
        budget = sequence.thinking
        track = ThinkingTrack(budget, sequence.prompt_ids, sequence.output_ids.tolist())
        header[BUDGET : ENDED + 1] = budget.max_tokens, track.spent, track.started, track.ended
        for count, begin, mark in ((STARTS, STARTS_AT, budget.start_ids), (ENDS, ENDS_AT, budget.end_ids)):
            header[count] = len(mark)
            header[begin] = place(np.array((*mark, *fallbacks(mark)), np.int32))
    unused = np.zeros(capacity - len(ids), np.int32)
    header[CAPACITY], header[IDS_AT] = capacity, place(ids, unused, counts, unused)
    return np.concatenate(sections)


_NONE: Int32 = np.empty(0, np.int32)


def forbidding_state(vocab_size: int) -> Int32:
    """One that leaves nothing to draw, whatever it is fed, and that any number of sequences may share."""
    header = np.zeros(HEADER, np.int32)
    header[REPETITION : PRESENCE + 1] = np.array([1.0, 0.0, 0.0], np.float32).view(np.int32)
    header[[BIAS_AT, MASK_AT, WORDS_AT, RING_AT, IDS_AT, STARTS_AT, ENDS_AT]] = HEADER
    header[MASKED], header[BUDGET] = 1, -1
    return np.concatenate([header, np.zeros(-(-vocab_size // 32), np.int32)])


def _known_tokens(sequence: Sequence, vocab_size: int, room: int | None) -> tuple[Int32, Int32, int]:
    """Distinct ids, how often each is in the output, and how many there is room for."""
    ids = np.unique(np.concatenate([sequence.prompt_ids, sequence.output_ids]).astype(np.int32))
    counts = np.zeros(len(ids), np.int32)
    np.add.at(counts, np.searchsorted(ids, sequence.output_ids), 1)
    most = most_ids(sequence, len(ids), vocab_size)
    return ids, counts, most if room is None else min(most, len(ids) + room)


def most_ids(sequence: Sequence, known: int, vocab_size: int) -> int:
    """Distinct ids that a sequence may come to have, which starts with so many."""
    return max(known, min(vocab_size, known + sequence.stop.max_tokens + _SPARE))


def _mask(allowed: tuple[int, ...], vocab_size: int) -> Int32:
    """Empty where all are allowed."""
    if not allowed:
        return _NONE
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
