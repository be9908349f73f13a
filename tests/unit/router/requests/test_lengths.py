"""Errors of lengths name their own cause and fix, and prompts are cut no more than they must be."""

from __future__ import annotations

import numpy as np
import pytest

from quire_common.columns import pack_i32
from quire_common.errors import InvalidArgument
from quire_router.requests.lengths import check_resume, truncated
from quire_router.sequences.job import GenerateJob, Resume, TextPrompt


@pytest.mark.parametrize(
    ("characters", "max_tokens", "cause", "fix"),
    [
        (2049, 10, "2049 characters for 2 tokens, more than 1024 per token", "number of characters that came"),
        (4, 2, "no token is left", "what has not ended"),
    ],
)
def test_refused_resume_names_its_cause(characters: int, max_tokens: int, cause: str, fix: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_resume(Resume(pack_i32([1, 2]), characters), max_tokens, vocab_size=300)
    error = caught.value
    assert (error.code, error.param) == ("BAD_RESUME", "resume") and cause in error.message and fix in error.fix


def test_resume_within_its_bounds_is_accepted() -> None:
    check_resume(Resume(pack_i32([1, 2]), 2048), 3, vocab_size=300)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "default", "kept"),
    [
        (90, 30, None, 70),  # what the client demands
        (90, None, None, 90),
        (120, None, None, 99),
        (120, None, 16, 84),
        (60, None, 100, 60),  # a bound on the answer does not cut a prompt that fits
        (60, None, 1000, 60),
        (99, None, 1000, 99),
        (120, None, 1000, 75),
    ],
)
def test_default_answer_length_reserves_at_most_a_quarter_of_the_context(
    prompt: int, max_tokens: int | None, default: int | None, kept: int
) -> None:
    job = GenerateJob("m", (TextPrompt("x"),), max_tokens=max_tokens, default_max_tokens=default, truncate_to=-1)
    ids = np.arange(prompt, dtype=np.int32)
    assert truncated(job, ids, 100).tolist() == ids[prompt - kept :].tolist()
