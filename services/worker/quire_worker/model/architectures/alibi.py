"""ALiBi: the slopes of a model's heads (Press et al., 2022)."""

from __future__ import annotations

import math


def alibi_slopes(heads: int, largest: float = 8.0) -> tuple[float, ...]:
    """Return one slope for each head: 2 ** (-largest * i / n) for i = 1..n, for the greatest power of two n up to
    `heads`. Further heads get every other slope of 2 n heads."""
    whole = 1 << int(math.log2(heads))
    slopes = [2.0 ** (-largest * (head + 1) / whole) for head in range(whole)]
    between = [2.0 ** (-largest * (head + 1) / (2 * whole)) for head in range(0, 2 * (heads - whole), 2)]
    return (*slopes, *between)
