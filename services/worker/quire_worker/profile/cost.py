"""Cost: the least bytes and operations that calls of a step's parts need, by arithmetic.

Bytes are the values that are read and written, each once. Operations are multiplications and additions. No other way of
computing the same result needs less, except in layers with a window or chunks, whose rows count as if they saw all
positions up to their own. A GEMM of [R, I] and [O, I] takes 2 R I O operations. A pair of a query row and a key that it
sees takes 4 D for each query head, 2 D for the score and 2 D for the value. A fresh prompt of n tokens is causal, so it
has n (n + 1) / 2 pairs and not n^2. Exponentials, comparisons and random numbers count nothing. A kernel's input may
still lie in the L2 cache, and then a call can be faster than its floor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from quire_worker.ops.interface import HeadShape
from quire_worker.ops.weight import Weight

_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of all calls of one name in a step."""

    calls: int = 0
    bytes: int = 0
    flops: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.calls + other.calls, self.bytes + other.bytes, self.flops + other.flops)


class Attended(NamedTuple):
    """The keys that sequences attend to."""

    rows: int
    """Query rows."""
    keys: int
    """Positions of all sequences, each once."""
    pairs: int
    """Of a row and a position that it sees."""

    @classmethod
    def of(cls, position: int, count: int) -> Attended:
        """Return the keys for `count` rows of one sequence, which follow `position` earlier tokens."""
        end = position + count
        return cls(count, end, (end * (end + 1) - position * (position + 1)) // 2)

    def times(self, sequences: int) -> Attended:
        """Return the keys for this many equal sequences."""
        return Attended(self.rows * sequences, self.keys * sequences, self.pairs * sequences)


def embedding_cost(rows: int, hidden: int, element: int) -> Cost:
    """Return the cost of an embedding lookup: rows of the table are read, and written."""
    return Cost(1, 2 * rows * hidden * element)


def norm_cost(rows: int, hidden: int, element: int, *, adds: bool) -> Cost:
    """Return the cost of an RMS norm; `adds`: a residual is read and written too."""
    return Cost(1, (4 if adds else 2) * rows * hidden * element)


def product_cost(rows: int, weight: Weight, element: int) -> Cost:
    """Return the cost of a linear layer: the stored weight is read, and rows are read and written. It takes 2 * rows *
    inputs * outputs operations. `element`: bytes of an element of a row."""
    outputs, inputs = weight.outputs, weight.inputs
    return Cost(1, weight.num_bytes + rows * (inputs + outputs) * element, 2 * rows * inputs * outputs)


def gated_product_cost(rows: int, weight: Weight, element: int) -> Cost:
    """Return the cost of a linear layer in which half of the outputs are gates. Only the products of gates and other
    outputs are written."""
    outputs, inputs = weight.outputs, weight.inputs
    return Cost(1, weight.num_bytes + rows * (inputs + outputs // 2) * element, 2 * rows * inputs * outputs)


def rope_cost(rows: int, shape: HeadShape, element: int, page_element: int) -> Cost:
    """Return the cost of norm, rope and page write, in bytes: queries, keys and values are read; queries are written,
    keys and values are written to their pages. `element` and `page_element`: bytes of a number in rows and in pages."""
    heads, kv_heads = rows * shape.heads * shape.head_dim, rows * shape.kv_heads * shape.head_dim
    return Cost(1, (2 * heads + 2 * kv_heads) * element + 2 * kv_heads * page_element)


def attention_cost(attended: Attended, shape: HeadShape, element: int, page_element: int) -> Cost:
    """Return the cost of attention: keys and values are read once for all rows; queries are read, and results of the
    same size are written. It takes 4 D operations for each pair and query head."""
    kv = 2 * attended.keys * shape.kv_heads * shape.head_dim * page_element
    rows = 2 * attended.rows * shape.heads * shape.head_dim * element
    return Cost(1, kv + rows, 4 * attended.pairs * shape.heads * shape.head_dim)


def activation_cost(rows: int, inner: int, element: int, *, gated: bool) -> Cost:
    """Return the cost of an activation that writes [rows, inner]. It reads as much, or twice as much if it is gated."""
    return Cost(1, (3 if gated else 2) * rows * inner * element)


def logits_cost(rows: int, vocab: int, element: int) -> Cost:
    """Return the cost of a kernel that reads rows of logits once and writes almost nothing: sampling limits, sampling,
    logprobs."""
    return Cost(1, rows * vocab * element)


def controls_cost(rows: int, vocab: int, element: int) -> Cost:
    """Return the cost of penalties and biases: logits are copied in float32. Logits processor states are small compared
    with that."""
    return Cost(1, rows * vocab * (element + _FLOAT32))
