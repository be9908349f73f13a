"""Errors of lengths name their own cause and fix."""

from __future__ import annotations

import pytest

from quire_common.columns import pack_i32
from quire_common.errors import InvalidArgument
from quire_router.requests.lengths import check_resume
from quire_router.sequences.job import Resume


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
