"""A page pool on a GPU with content that every process can compute.

`python -m bench.gpu.peers.pool PAGES PAGE_BYTES` makes one, prints its descriptor as hex, and keeps it until its input
ends.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from quire_worker.cuda.peers.driver import cuda_driver
from quire_worker.cuda.peers.ipc_memory import IpcMemory


def page_content(page: int, page_bytes: int, device: torch.device) -> Tensor:
    """Return uint8 [page_bytes], which differs from page to page and from word to word."""
    word = torch.arange(page_bytes // 4, dtype=torch.int32, device=device)
    word = word * 40503 + (page * 2654435761 & 0x7FFFFFFF)
    return (word ^ (word >> 13)).view(torch.uint8)


def fill(pool: Tensor) -> None:
    """pool uint8 [pages, bytes]."""
    for page in range(pool.shape[0]):
        pool[page] = page_content(page, pool.shape[1], pool.device)


def main() -> int:
    pages, page_bytes = map(int, sys.argv[1:])
    pool = torch.empty((pages, page_bytes), dtype=torch.uint8, device="cuda")
    fill(pool)
    torch.cuda.synchronize()
    print(IpcMemory.of(pool, cuda_driver()).pack().hex(), flush=True)
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
