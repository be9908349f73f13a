"""Frames that are made by concatenation equal frames made from dicts, for any text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_common.columns import pack_i32
from quire_common.errors import Unavailable
from quire_router.front.http.formats.answer_format import FrameParts
from quire_router.front.http.formats.chat_format import ChatFormat
from quire_router.front.http.formats.completion_format import CompletionFormat
from quire_router.front.http.formats.logprob_format import TokenNames, echoed_logprobs, token_text
from quire_router.front.http.parsing.parse import ParsedRequest
from quire_router.requests.generation import Generation
from quire_router.sequences.delta import Delta, LogprobEntry
from tests.unit.router.makers import make_generation, make_job

Make = Callable[[Generation, ParsedRequest], Any]


def parsed(*, usage: bool = False, continuous: bool = False, **options: Any) -> tuple[Generation, ParsedRequest]:
    job = make_job(**options)
    return make_generation(job), ParsedRequest(job, True, usage, continuous, None, 0)


def delta(text: str, finish: int = 0, index: int = 0, **fields: Any) -> Delta:
    return Delta(**{**_PLAIN, "text": text, "finish": finish, "index": index, **fields})


_PLAIN: dict[str, Any] = {"tokens": 1, "token_ids": b"", "entries": [], "offsets": [], "stop_reason": None}


def data(frame: bytes) -> Any:
    assert frame.startswith(b"data: ") and frame.endswith(b"\n\n") and frame.count(b"\n") == 2
    return json.loads(frame[6:])


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_round_trips_through_a_frame(text: str) -> None:
    assert data(CompletionFormat(*parsed(n=2)).frame(delta(text, index=1)))["choices"][0] == {
        "index": 1,
        "text": text,
        "logprobs": None,
        "finish_reason": None,
        "stop_reason": None,
    }
    assert data(ChatFormat(*parsed(n=2)).frame(delta(text, index=1)))["choices"][0] == {
        "index": 1,
        "delta": {"content": text},
        "logprobs": None,
        "finish_reason": None,
    }


@pytest.mark.parametrize("make", [CompletionFormat, ChatFormat])
@pytest.mark.parametrize("token_ids", [False, True])
def test_fast_and_full_frames_have_equal_members(make: Make, token_ids: bool) -> None:
    fast = make(*parsed(usage=True, token_ids=token_ids, n=2))
    full = make(*parsed(usage=True, continuous=True, token_ids=token_ids, n=2))
    for index, ids in ((0, [97]), (0, [98, 99]), (1, [97]), (1, [98])):  # first frames and later ones
        told = data(fast.frame(delta("a", index=index, token_ids=pack_i32(ids))))
        wanted = data(full.frame(delta("a", index=index, token_ids=pack_i32(ids))))
        assert told.pop("usage") is None
        assert wanted.pop("usage") == {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2}
        assert told == wanted and told["choices"][0].get("token_ids", ids) == ids
        assert ("token_ids" in told["choices"][0]) is token_ids


def test_last_frame_has_the_finish_reason() -> None:
    last = data(CompletionFormat(*parsed()).frame(delta("z", 1, stop_reason="END")))["choices"][0]
    assert (last["text"], last["finish_reason"], last["stop_reason"]) == ("z", "stop", "END")
    last = data(ChatFormat(*parsed()).frame(delta("", 2)))["choices"][0]
    assert (last["delta"], last["finish_reason"], last["stop_reason"]) == ({}, "length", None)
    last = data(ChatFormat(*parsed()).frame(delta("", 4)))["choices"][0]
    assert last["finish_reason"] == "error"


def test_text_offsets_continue_over_frames() -> None:
    answer = CompletionFormat(*parsed(logprobs=0))
    entries = [LogprobEntry(97, -1.0, 1, [], []), LogprobEntry(98, float("-inf"), 1, [], [])]
    first = data(answer.frame(delta("ab", entries=entries, offsets=[1, 2])))["choices"][0]["logprobs"]
    second = data(answer.frame(delta("c", entries=entries[:1], offsets=[3])))["choices"][0]["logprobs"]
    assert first["text_offset"] + second["text_offset"] == [0, 1, 2]
    assert first["token_logprobs"] == [-1.0, -9999.0]  # JSON has no infinity


@pytest.mark.parametrize(
    ("prompt", "pieces", "offsets"),
    [
        ("ab", [b"<s>", b"a", b"b"], [0, 0, 1]),
        ("ab", [b"a", b"<|sep|>", b"b", b"</s>"], [0, 1, 1, 2]),
        ("", [b"<s>", b"</s>"], [0, 0]),
        ("Hi you", [b"<s>", b" Hi", b" you"], [0, 0, 2]),
        ("xéy", [b"x", b"\xc3", b"\xa9", b"y"], [0, 1, 1, 2]),
    ],
)
def test_offsets_of_an_echoed_prompt_are_indices_in_its_text(
    prompt: str, pieces: list[bytes], offsets: list[int]
) -> None:
    known: Any = dict(enumerate(pieces))
    names = TokenNames(known, by_id=False)
    told = echoed_logprobs(prompt, list(known), [None] * len(pieces), 0, names)
    assert told["text_offset"] == offsets


def test_prompt_token_ids_are_only_in_the_first_frame() -> None:
    answer = CompletionFormat(*parsed(token_ids=True))
    first = data(answer.frame(delta("a", token_ids=pack_i32([97]))))["choices"][0]
    second = data(answer.frame(delta("b", token_ids=pack_i32([98]))))["choices"][0]
    assert (first["token_ids"], first["prompt_token_ids"]) == ([97], [112, 113])
    assert second["token_ids"] == [98] and "prompt_token_ids" not in second


def test_tokens_that_are_not_utf8_have_distinct_names() -> None:
    assert token_text("é".encode()) == "é"
    assert token_text(b"\xc3") == "bytes:\\xc3" != token_text(b"\xc4")


def test_error_frame_is_an_openai_error_event() -> None:
    error = data(FrameParts.failed(Unavailable("GONE", "It went.", "Retry.")).removesuffix(b"data: [DONE]\n\n"))[
        "error"
    ]
    assert error == {"message": "It went. Retry.", "type": "service_unavailable_error", "param": None, "code": "GONE"}
