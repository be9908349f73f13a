"""The forms of a prompt: which are understood, and which are refused."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from quire.errors import InvalidArgument
from quire.prompts import is_batch, normalise


@pytest.mark.parametrize("prompt", [[1, 2], (1, 2), range(1, 3), array("i", [1, 2]), {"prompt_token_ids": [1, 2]}])
def test_sequences_of_integers_are_token_ids(prompt: Any) -> None:
    assert normalise(prompt) == [1, 2]


@pytest.mark.parametrize(
    "prompt",
    [
        b"abc",
        b"",
        bytearray(b"abc"),
        memoryview(b"abc"),
        [True, False],
        [1, True],
        ["a"],
        [1.0],
        5,
        None,
        {"prompt": b"abc"},
        {"prompt_token_ids": [True]},
    ],
)
def test_other_types_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        normalise(prompt)
    assert (caught.value.code, caught.value.param) == ("BAD_PROMPT", "prompt")


@pytest.mark.parametrize("prompt", [b"abc", b"", bytearray(), memoryview(b"")])
def test_bytes_are_no_batch_of_prompts(prompt: Any) -> None:
    assert not is_batch(prompt)
