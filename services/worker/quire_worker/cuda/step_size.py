"""StepSize: the padded shape of a step, and the choice of the sizes that get a graph of their own."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice, pairwise

# Numbers of sequences of steps that only decode, up to 512, and the step between larger ones. 448 is left out: a step
# of an 8B model took longer with 448 rows than with 512 (bench/LOG.md).
_DECODES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 512)
_DECODES_STEP = 128
_MIXED_DECODES = (0, 16, 64, 128, 192, 256, 384)
_PREFILL_ROWS = (32, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
# Further numbers of decode rows and prefill rows, which the fine sizes have too. Up to 512 prefill rows, a fine size is
# padded by at most 63 of them; up to 2,048 by at most 127, and beyond by at most 255.
_FINE_DECODES = (32, 48, 96)
_FINE_PREFILL_ROWS = (*range(64, 513, 64), *range(640, 2049, 128), *range(2304, 4097, 256))
MOST_PADDED_ROWS = _PREFILL_ROWS[-1]
"""Larger steps keep the device busy for about as long as their launches take: a graph is worth little padding."""
_WASTE = 1 / 16
_ROUNDED = 64
_LONG_ROWS = (1024, 2048)
"""From so many rows on other kernels are launched than below."""
_FEW_CHUNKS, MOST_CHUNKS = 64, 128
# Options of rows of a step, beside masks: filters, logits processor states.
_ASKED = ((False, False), (True, False), (True, True))


@dataclass(frozen=True, slots=True, order=True)
class StepSize:
    """Decode rows come first, one per sequence; then `rows` of prefill in `chunks` sequences."""

    decodes: int
    rows: int = 0
    chunks: int = 0
    filtered: bool = False
    """Some row may limit which tokens may be sampled."""
    controlled: bool = False
    """Some row may have its logits changed on the device: by penalties, biases, allowed or bad tokens, or a thinking
    budget."""
    masked: bool = False
    """Some row may have a grammar."""

    @property
    def in_advance(self) -> bool:
        """Whether a graph of this size is captured before a step needs it. Of the sizes with logits processor states,
        only the one that decodes one sequence is. Of the sizes with masks, those that only decode without such states
        are."""
        if self.masked:
            return not self.rows and not self.controlled
        return not self.controlled or (self.decodes == 1 and not self.rows)

    @property
    def sequences(self) -> int:
        """Rows of logits."""
        return self.decodes + self.chunks

    @property
    def total_rows(self) -> int:
        """Tokens that run."""
        return self.decodes + self.rows

    def tiles(self, tokens: int) -> int:
        """Return the most prefill tiles of so many tokens that the chunks may need; 0 without prefill rows."""
        return 0 if not self.rows else -(-self.rows // tokens) + self.chunks

    def holds(self, other: StepSize) -> bool:
        """Whether the other size fits into this one's padding: it has no more decode rows, prefill rows and chunks, and
        no flag that this size lacks."""
        return (
            self.decodes >= other.decodes
            and self.rows >= other.rows
            and self.chunks >= other.chunks
            and (self.filtered or not other.filtered)
            and (self.controlled or not other.controlled)
            and (self.masked or not other.masked)
        )

    def suits(self, other: StepSize) -> bool:
        """Whether the other size fits into this size's padding. If this size has more than MOST_PADDED_ROWS prefill
        rows, it must also have at most 1/16 more rows in all than the other."""
        wasteful = self.rows > MOST_PADDED_ROWS and self.total_rows > (1 + _WASTE) * other.total_rows
        return self.holds(other) and not wasteful


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of decoding sequences that have a graph, up to and with the largest."""
    larger = range(_DECODES[-1] + _DECODES_STEP, max_num_seqs + _DECODES_STEP, _DECODES_STEP)
    return sorted({min(size, max_num_seqs) for size in (*_DECODES, *larger)})


def graph_sizes(max_num_seqs: int, max_tokens: int, *, masked: bool = False) -> list[StepSize]:
    """Return the coarse sizes to capture as one graph, the most wanted first: decoding, prefill alone, mixed steps, and
    full steps if `max_tokens` is none of _PREFILL_ROWS. Then the same sizes follow with filters, then also with logits
    processor states. If the device applies grammars (`masked`), all of these follow with masks. `max_tokens` is the
    limit of tokens in a step, decode rows included."""
    sizes = [StepSize(each) for each in decode_sizes(max_num_seqs)]
    mixed_decodes = _mixed_decodes(max_num_seqs)
    rows = [each for each in _PREFILL_ROWS if each <= max_tokens]
    sizes += [StepSize(decodes, each, _chunks(each)) for decodes in mixed_decodes for each in rows]
    if max_tokens not in rows:
        full = _full_steps(mixed_decodes, max_tokens)
        full = [(decodes, min(_round_up(left, _ROUNDED), max_tokens)) for decodes, left in full]
        sizes += [StepSize(decodes, each, _chunks(each)) for decodes, each in full]
    sizes = [
        replace(size, filtered=filtered, controlled=controlled) for filtered, controlled in _ASKED for size in sizes
    ]
    return sizes + [replace(size, masked=True) for size in sizes if masked]


def fine_sizes(max_num_seqs: int, max_tokens: int) -> list[StepSize]:
    """Return the fine sizes to capture as one graph. They lie between the coarse sizes with prefill rows, so that steps
    with prompts are padded less. All have filters, so that steps with and without filters can use them, but neither
    masks nor logits processor states. The sizes with the fewest decode rows come first."""
    coarse = _mixed_decodes(max_num_seqs)
    decodes = sorted({*coarse, *(number for number in _FINE_DECODES if number < max_num_seqs)})
    rows = sorted(number for number in {*_PREFILL_ROWS, *_FINE_PREFILL_ROWS} if number <= max_tokens)
    sizes = [
        StepSize(decode_rows, prefill_rows, _chunks(prefill_rows), filtered=True)
        for decode_rows in decodes
        for prefill_rows in rows
    ]
    return [size for size in sizes if not (size.decodes in coarse and size.rows in _PREFILL_ROWS)]


def kernel_sizes(max_num_seqs: int, max_tokens: int, count: int, *, masked: bool = False) -> list[StepSize]:
    """Return a few sizes whose steps use all kernels of any graph: the first `count` that are captured, one that
    decodes `max_num_seqs` sequences, long ones, one with filters, and two with logits processor states, which have
    different layouts of results. If the device applies grammars (`masked`), there is one of each kind with masks."""
    sizes = graph_sizes(max_num_seqs, max_tokens)
    long = list[StepSize]()
    for least in _LONG_ROWS:
        long += [size for size in sizes if size.rows >= least][:1]
        long += [size for size in sizes if size.total_rows >= least][:1]
    controlled = (StepSize(each, filtered=True, controlled=True) for each in (1, 4))
    kinds = (StepSize(max_num_seqs), *long, StepSize(1, filtered=True), *controlled)
    masks = (StepSize(1, filtered=filtered, controlled=also, masked=True) for filtered, also in _ASKED if masked)
    return [*dict.fromkeys((*sizes[:count], *kinds, *masks))]


def pieced_sizes(max_num_seqs: int, max_tokens: int, piece: int, *, masked: bool = False) -> list[StepSize]:
    """Return the sizes of steps that are captured in pieces, which are those with more than MOST_PADDED_ROWS prefill
    rows. The most wanted come first: full steps, shorter steps, then the same with logits processor states. If the
    device applies grammars (`masked`), all of these follow with masks. All have filters. The number of prefill rows is
    a multiple of `piece`. In the largest size for a number of decode rows, it exceeds the tokens by one `piece` or
    more, but by less than two, since a fresh chunk at a step's end is padded."""
    full, shorter = list[StepSize](), list[StepSize]()
    for decodes, left in _full_steps(_mixed_decodes(max_num_seqs), max_tokens):
        most = _round_up(left, piece) + piece
        if left > MOST_PADDED_ROWS:
            rows = range(most, MOST_PADDED_ROWS, -piece)
            sizes = [StepSize(decodes, each, _chunks(each), filtered=True) for each in rows]
            full += sizes[:2]
            shorter += sizes[2:]
    sizes = full + shorter
    sizes += [replace(size, controlled=True) for size in sizes]
    return sizes + [replace(size, masked=True) for size in sizes if masked]


def _chunks(rows: int) -> int:
    return min(rows, _FEW_CHUNKS if rows <= MOST_PADDED_ROWS else MOST_CHUNKS)


def _mixed_decodes(max_num_seqs: int) -> list[int]:
    return sorted({min(each, max_num_seqs) for each in _MIXED_DECODES} | {max_num_seqs})


def _full_steps(decodes: list[int], max_tokens: int) -> list[tuple[int, int]]:
    """Return pairs of a number of decode rows that graphs have and the greatest number of prefill tokens beside them in
    a step of `max_tokens`. It is reached with the fewest sequences that are padded to this number of rows. Pairs
    without prefill tokens are left out."""
    left = [(0, max_tokens), *((most, max_tokens - fewer - 1) for fewer, most in pairwise(decodes))]
    return [(each, tokens) for each, tokens in left if tokens > 0]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class SortedSizes:
    """Sizes in the order of their cost: those with the fewest rows in all, of decode and prefill, come first."""

    def __init__(self, sizes: Iterable[StepSize]) -> None:
        self._sizes = sorted(sizes, key=lambda s: (s.total_rows, s.sequences, s.masked, s.controlled, s.filtered))
        self._rows = [size.total_rows for size in self._sizes]

    def least_that_suits(self, wanted: StepSize) -> StepSize | None:
        """Return the size with the fewest rows in all that suits the wanted one; None: no size does."""
        begin = bisect_left(self._rows, wanted.total_rows)
        return next((size for size in islice(self._sizes, begin, None) if size.suits(wanted)), None)
