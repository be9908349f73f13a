"""Pages for the kvstore's benchmark. The bodies are random and made once; each round gives them new names."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire_common.pages import HEADER_BYTES, PageRun, frame_page

NAMESPACE = b"n" * 32
Bodies = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Pages:
    """The pages of one round. `name` belongs to this round, so that pages of an earlier round cannot be mistaken for
    its pages."""

    name: str
    run: PageRun
    bodies: Bodies
    framed: list[bytes]

    @classmethod
    def make(cls, bodies: Bodies, name: str) -> Pages:
        hashes = tuple(hashlib.sha256(f"{name} {index}".encode()).digest() for index in range(len(bodies)))
        run = PageRun(NAMESPACE, 0, hashes)
        return cls(
            name, run, bodies, [frame_page(run.key(i), "uint8", body) + body.tobytes() for i, body in enumerate(bodies)]
        )

    @property
    def page_bytes(self) -> int:
        return int(self.bodies.shape[1])

    @property
    def framed_bytes(self) -> int:
        return self.page_bytes + HEADER_BYTES

    @property
    def total_bytes(self) -> int:
        return self.framed_bytes * len(self.framed)

    def parts(self, size: int) -> list[range]:
        """Yield indices, this many at a time, as workers move them."""
        return [range(start, min(start + size, len(self.framed))) for start in range(0, len(self.framed), size)]
