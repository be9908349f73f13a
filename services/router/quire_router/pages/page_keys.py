"""page_keys: the key of a page in the index, 64 bits of its hash, its namespace and its group.

Among a million pages, the probability that two share a key is 1 in 37 million. Then a placement may be worse than it
could be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire_common.pages import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

# Odd, so that groups differ in all bits.
_GROUP = 0x9E3779B97F4A7C15
_ALL = (1 << 64) - 1


def page_keys(namespace: bytes, group: int, hashes: Sequence[bytes]) -> NDArray[np.uint64]:
    """Return a 64-bit key for each hash of 32 bytes: the first 8 bytes of the hash, XORed with the first 8 bytes of the
    namespace and a multiple of the group. A key of 0 becomes 1."""
    words = np.frombuffer(b"".join(hashes), "<u8")[:: HASH_BYTES // 8]
    pool = (int.from_bytes(namespace[:8], "little") ^ (group * _GROUP)) & _ALL
    keys: NDArray[np.uint64] = words ^ np.uint64(pool)
    keys[keys == 0] = 1
    return keys
