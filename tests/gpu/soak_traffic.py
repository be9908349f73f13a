"""SoakTraffic: random requests: short and long, some with a beginning in common, and of every way of sampling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from quire_common.logit_controls import LogitControls
from quire_common.sequence import Sampling, Sequence, Stop
from quire_worker.arrays import Int32

_FIRST_ID = 3
_PREFIXES = 8
_SHARED = 0.4
_MANY_STOP_IDS = 12


@dataclass(frozen=True, slots=True)
class SoakTraffic:
    """For a vocabulary; prompts and outputs of up to so many tokens, of which a shared beginning takes up to half."""

    vocab_size: int
    most_prompt: int
    most_output: int
    seed: int = 0

    def requests(self) -> Iterator[Sequence]:
        """Without end; the same each time."""
        rng = np.random.default_rng(self.seed)
        longest = max(1, self.most_prompt // 2)
        prefixes = [self._ids(rng, int(rng.integers(1, longest + 1))) for _ in range(_PREFIXES)]
        while True:
            yield self._request(rng, prefixes)

    def _request(self, rng: np.random.Generator, prefixes: list[Int32]) -> Sequence:
        # Most are short.
        size = 1 + int((self.most_prompt - 1) * rng.random() ** 2)
        prompt = self._ids(rng, size)
        if rng.random() < _SHARED:
            prefix = prefixes[int(rng.integers(0, len(prefixes)))]
            prompt = np.concatenate([prefix, prompt[: max(1, self.most_prompt - len(prefix))]])
        return Sequence(prompt, self._stop(rng), self._sampling(rng), skip_cache_read=bool(rng.random() < 0.1))

    def _stop(self, rng: np.random.Generator) -> Stop:
        most = int(rng.integers(1, self.most_output + 1))
        # More stop ids than a graph has room for are rare.
        count = int(rng.choice([0, 1, 8, _MANY_STOP_IDS], p=[0.5, 0.24, 0.24, 0.02]))
        return Stop(
            max_tokens=most,
            min_tokens=int(rng.integers(0, most + 1)) if rng.random() < 0.2 else 0,
            stop_token_ids=tuple(self._ids(rng, count).tolist()),
            ignore_eos=bool(rng.random() < 0.5),
        )

    def _sampling(self, rng: np.random.Generator) -> Sampling:
        if rng.random() < 0.4:
            return Sampling(logprobs=self._logprobs(rng))
        filtered = rng.random() < 0.6
        return Sampling(
            temperature=float(rng.choice([0.0, 0.7, 1.3])),
            top_k=int(rng.choice([0, 5, 40])) if filtered else 0,
            top_p=float(rng.choice([1.0, 0.9])) if filtered else 1.0,
            min_p=float(rng.choice([0.0, 0.05])) if filtered else 0.0,
            seed=int(rng.integers(0, 2**63)),
            logprobs=self._logprobs(rng),
            controls=self._controls(rng) if rng.random() < 0.4 else None,
        )

    def _controls(self, rng: np.random.Generator) -> LogitControls:
        a, b, c = self._ids(rng, 3).tolist()
        kinds = (
            LogitControls(frequency_penalty=0.5),
            LogitControls(presence_penalty=1.0, repetition_penalty=1.2),
            LogitControls(logit_bias=((a, 5.0),), bad_words=((b,), (c, a))),
            LogitControls(allowed_token_ids=tuple(sorted({*self._ids(rng, 40).tolist(), a}))),
        )
        return kinds[int(rng.integers(0, len(kinds)))]

    def _logprobs(self, rng: np.random.Generator) -> int:
        return int(rng.choice([-1, 0, 3], p=[0.7, 0.15, 0.15]))

    def _ids(self, rng: np.random.Generator, count: int) -> Int32:
        return rng.integers(_FIRST_ID, self.vocab_size, count).astype(np.int32)
