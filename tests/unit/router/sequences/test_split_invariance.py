"""A client gets the same answer however tokens are grouped into rows, and however slowly the client reads.

Rows pass through the tokenizer's own text stream, as in the services. Text, the cut at a stop string, usage and
logprobs equal those of the whole. (Other tests compare the text stream itself with a plain decode.)
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_common.columns import pack_i32
from quire_router.front.http.formats.chat_format import ChatFormat
from quire_router.front.http.formats.completion_format import CompletionFormat
from quire_router.front.http.formats.messages_format import MessagesFormat
from quire_router.front.http.parsing.parse import ParsedRequest
from quire_router.requests.generation import Generation
from quire_router.sequences.delta import LENGTH
from quire_router.sequences.logprob_entries import pack_entry
from quire_tokenizer.detokenize.stop_matcher import stop_strings
from quire_tokenizer.detokenize.text_stream import StopRules, TextStream
from quire_tokenizer.model_folder import read_model_folder
from quire_tokenizer.vocabulary import Vocabulary
from tests.tiers import examples
from tests.unit.router.makers import make_generation, make_job

VOCABULARY = Vocabulary(read_model_folder(str(Path(__file__).parents[4] / "models" / "demo")))
PIECES = st.lists(
    st.sampled_from(["END", "E", "N", "the", " dog", "\n", "汉字", "好", "😀", "👩‍👩‍👧", "é", '"\\']), max_size=10
)
STOPS = st.sampled_from([(), ("END",), ("字",), ("👩‍👩", "dog"), ("\n", "EN"), ("😀", "é")])
CUTS = st.lists(st.integers(0, 40), max_size=12)


def groups(count: int, cuts: list[int]) -> list[tuple[int, int]]:
    """Ranges of 0..count, cut at these places; none is empty but the only one."""
    places = sorted({0, count, *(cut for cut in cuts if cut < count)})
    return list(pairwise(places)) or [(0, 0)]


def told(make: Any, ids: list[int], stop: tuple[str, ...], cuts: list[int], takes: list[int], logprobs: int) -> Any:
    """All that the client reads, put together, and the usage."""
    job = make_job(stop=stop, logprobs=logprobs)
    generation: Generation = make_generation(job)
    answer = make(generation, ParsedRequest(job, True, False, False, None, 0))
    (sequence,) = generation.sequences
    rules = StopRules(stop_strings(stop) if stop else None, frozenset(), False, 0)
    decoder = VOCABULARY.decoder(skip_special_tokens=True, spaces_between_special_tokens=True)
    stream, frames = TextStream(decoder, rules, want_offsets=True), [answer.opening()]
    for turn, (start, end) in enumerate(groups(len(ids), cuts)):
        row, finish = ids[start:end], LENGTH if end == len(ids) else 0
        sequence.engine.add_row(pack_i32(row), finish, 1)
        if logprobs >= 0:
            for token_id in row:
                sequence.engine.entries.append(pack_entry(token_id, -1.0, 1, b"", b""))
        text, stop_index, used = stream.advance(row, finish)
        sequence.text.offsets += stream.offsets or []
        ended = sequence.add_text(text, stop_index, used)
        if (ended or turn not in takes) and sequence.queued:
            frames += map(answer.frame, generation.take_deltas())
        if ended:
            break
    assert not generation.running
    return told_by(b"".join((*frames, answer.closing()))), generation.usage()


def told_by(stream: bytes) -> tuple[str, list[Any], Any]:
    """Text, logprobs and the end, of the events of any of the formats."""
    texts: list[str] = []
    logprobs: list[Any] = []
    end: Any = None
    for frame in stream.removesuffix(b"\n\n").split(b"\n\n"):
        lines = frame.split(b"\n")
        assert lines[-1].startswith(b"data: ") and len(lines) <= 2
        if lines[-1] == b"data: [DONE]":
            continue
        data = json.loads(lines[-1][6:])
        for choice in data.get("choices", ()):
            texts.append(choice["text"] if "text" in choice else choice["delta"].get("content", ""))
            found = choice["logprobs"] or {}
            logprobs += found.get("content") or list(zip(*found.values(), strict=True))
            end = (choice["finish_reason"], choice.get("stop_reason")) if choice["finish_reason"] else end
        if data.get("type") == "content_block_delta":
            texts.append(data["delta"]["text"])
        if data.get("type") == "message_delta":
            end = (data["delta"], data["usage"])
    return "".join(texts), [entry[1:] if isinstance(entry, tuple) else entry for entry in logprobs], end


@pytest.mark.parametrize("make", [CompletionFormat, ChatFormat, MessagesFormat])
@examples(150)
@given(pieces=PIECES, stop=STOPS, cuts=CUTS, takes=CUTS, logprobs=st.sampled_from([-1, 0]))
def test_row_grouping_and_slow_readers_do_not_change_the_answer(
    make: Any, pieces: list[str], stop: tuple[str, ...], cuts: list[int], takes: list[int], logprobs: int
) -> None:
    ids = VOCABULARY.tokenizer.encode("".join(pieces), add_special_tokens=False).ids
    whole = told(make, ids, stop, [], [], logprobs)
    assert told(make, ids, stop, cuts, takes, logprobs) == whole
    assert whole[1].completion_tokens <= len(ids)


@pytest.mark.parametrize("text", ["a👩‍👩‍👧 good 好 dog END of it", "汉字é END 😀"])
def test_every_split_of_rows_gives_the_same_answer(text: str) -> None:
    ids = VOCABULARY.tokenizer.encode(text, add_special_tokens=False).ids
    stop = ("END",)
    whole = told(ChatFormat, ids, stop, [], [], 0)
    assert whole[0][0] == text.partition("END")[0] and whole[0][2] == ("stop", "END")
    assert whole[1].completion_tokens < len(ids)  # usage ends at the match
    for cut in range(len(ids)):
        assert told(ChatFormat, ids, stop, [cut], [], 0) == whole
    assert told(ChatFormat, ids, stop, list(range(len(ids))), [], 0) == whole
