"""DelayWorkload: the requests of `bench.scheduler.delay`: short prompts, outputs of mixed length, and the expected
answer of each.

The requests are a pool that a seed fixes. They are submitted again and again, with caching off, so that building
requests costs almost nothing during the measurement.
"""

from __future__ import annotations

import numpy as np

from quire.v1 import common_pb2, scheduler_pb2
from quire_common.sequence import Sampling, Sequence, Stop, sequence_to_pb
from quire_worker.paced.answer import paced_tokens

PROMPT_LEN = 32
OUTPUT_LEN = (64, 192)
PAGE_SIZE = 16
_POOL = 512
_VOCAB = (3, 32_000)


class DelayWorkload:
    """`submit(handle, length)` returns the next request; with `length` 0 it has the pool's own length. `answer(handle)`
    returns its tokens."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self._length = self.rng.integers(*OUTPUT_LEN, _POOL, endpoint=True)
        self._submits, self._answers = [], []
        for index in range(_POOL):
            prompt = self.rng.integers(*_VOCAB, PROMPT_LEN).astype(np.int32)
            sampling = Sampling(temperature=float(index % 2), seed=index)
            stop = Stop(max_tokens=int(self._length[index]), ignore_eos=True)
            sequence = Sequence(prompt, stop, sampling, skip_cache_read=True)
            self._submits.append(
                scheduler_pb2.Submit(
                    context=common_pb2.RequestContext(request_id=f"delay-{index}"), sequence=sequence_to_pb(sequence)
                )
            )
            self._answers.append(np.array(paced_tokens(prompt.tolist(), stop, sampling).tokens, np.int32))

    def length(self, handle: int) -> int:
        """Return the number of output tokens of the pool's request for this handle."""
        return int(self._length[handle % _POOL])

    def submit(self, handle: int, length: int = 0) -> scheduler_pb2.Submit:
        """Return the request. The object is reused for the next request of its kind, so serialize it before."""
        submit = self._submits[handle % _POOL]
        submit.handle = handle
        submit.sequence.stop.max_tokens = length or self.length(handle)
        return submit

    def answer(self, handle: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Return all tokens that the request may get. A request with a shorter length gets the first of them."""
        return self._answers[handle % _POOL]


def pages_needed(rows: int) -> int:
    """Return the number of pages that a running batch holds on average, when sequences are at random points of their
    lengths."""
    lengths = np.arange(OUTPUT_LEN[0], OUTPUT_LEN[1] + 1)
    held = np.concatenate([np.arange(PROMPT_LEN + 1, PROMPT_LEN + length + 1) for length in lengths])
    return round(rows * float(np.ceil(held / PAGE_SIZE).mean()))
