from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_worker.sampling.gumbel import noise_of_rows, noise_of_tokens
from quire_worker.sampling.philox import philox


def by_definition(seed: int, sample: int, position: int, token: int) -> float:
    words = philox(
        (
            np.array([token // 4], np.uint64),
            np.array([position], np.uint64),
            np.array([sample], np.uint64),
            np.array([0], np.uint64),
        ),
        (np.array([seed & 0xFFFFFFFF], np.uint64), np.array([seed >> 32], np.uint64)),
    )
    uniform = ((int(words[token % 4][0]) >> 8) + 0.5) / 2**24
    return -math.log(-math.log(uniform))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1)),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 70),
)
def test_rows_tokens_and_the_definition_agree(keys: list[tuple[int, int, int]], vocab_size: int) -> None:
    seed = np.array([key[0] for key in keys], np.uint64)
    sample = np.array([key[1] for key in keys], np.uint32)
    position = np.array([key[2] for key in keys], np.int64)
    rows = noise_of_rows(seed, sample, position, vocab_size)
    assert rows.shape == (len(keys), vocab_size)
    assert rows.min() > -2.86 and rows.max() < 17.34
    row, token = np.divmod(np.arange(rows.size), vocab_size)
    single = noise_of_tokens(seed[row], sample[row], position[row], token)
    # Bit for bit: which way noise is evaluated must never show.
    assert np.array_equal(rows.reshape(-1), single)
    assert np.array_equal(
        single[-3:], noise_of_tokens(seed[row][-3:], sample[row][-3:], position[row][-3:], token[-3:])
    )
    last = keys[-1]
    assert math.isclose(rows[-1, -1], by_definition(*last, vocab_size - 1), rel_tol=1e-12, abs_tol=1e-12)


def test_every_part_of_the_key_matters() -> None:
    def noise(seed: int = 1, sample: int = 1, position: int = 1) -> bytes:
        columns = np.array([seed], np.uint64), np.array([sample], np.uint32), np.array([position], np.int64)
        return noise_of_rows(*columns, 8).tobytes()

    assert len({noise(), noise(seed=2), noise(seed=1 + 2**32), noise(sample=2), noise(position=2)}) == 5


def test_noise_is_gumbel() -> None:
    noise = noise_of_rows(np.array([7], np.uint64), np.array([0], np.uint32), np.array([3], np.int64), 200_000)
    # Euler's constant and pi / sqrt(6), within five standard errors.
    assert abs(noise.mean() - 0.5772) < 5 * 1.2825 / math.sqrt(200_000)
    assert abs(noise.std() - 1.2825) < 0.02
