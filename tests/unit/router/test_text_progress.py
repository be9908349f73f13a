"""Parts of a text: they may come before it, and those of text that never came are forgotten."""

from __future__ import annotations

from quire.v1 import tokenizer_pb2
from quire_common.finish import PartKind
from quire_router.sequences.delta import TextPart
from quire_router.sequences.text_progress import TextProgress

CONTENT, REASONING, NAME, ARGUMENTS = PartKind


def test_kinds_have_the_numbers_of_the_contract() -> None:
    assert {f"PART_KIND_{kind.name}": kind.value for kind in PartKind} == {
        name: number for name, number in tokenizer_pb2.PartKind.items() if number
    }


def test_text_without_parts_is_not_parsed() -> None:
    progress = TextProgress()
    progress.add_answer(5, 1, 0.0)
    assert progress.take_parts("hello") is None


def test_parts_are_cut_where_deltas_are() -> None:
    progress = TextProgress()
    progress.add_part(REASONING, -1, 3)
    progress.add_part(REASONING, -1, 2)
    progress.add_part(NAME, 0, 4)
    assert progress.take_parts("abcd") == [TextPart(REASONING, -1, "abcd")]
    assert progress.take_parts("efind") == [TextPart(REASONING, -1, "e"), TextPart(NAME, 0, "find")]
    assert progress.take_parts("rest") == [TextPart(CONTENT, -1, "rest")]


def test_parts_of_text_that_did_not_come_are_forgotten_when_another_tokenizer_takes_over() -> None:
    progress = TextProgress()
    progress.add_part(CONTENT, -1, 4)
    progress.add_answer(3, 1, 0.0)
    progress.add_part(NAME, 0, 5)
    progress.forget_early_parts()
    progress.add_part(CONTENT, -1, 1)
    progress.add_part(ARGUMENTS, 0, 2)
    progress.add_answer(3, 1, 0.0)
    assert progress.take_parts("abc") == [TextPart(CONTENT, -1, "abc")]
    assert progress.take_parts("d{}") == [TextPart(CONTENT, -1, "d"), TextPart(ARGUMENTS, 0, "{}")]


def test_an_answer_that_is_taken_up_has_parts_from_there_on() -> None:
    progress = TextProgress()
    progress.start_after(2, 10, with_offsets=False)
    progress.forget_early_parts()
    progress.add_part(REASONING, -1, 2)
    progress.forget_early_parts()
    progress.add_part(REASONING, -1, 3)
    assert progress.take_parts("abc") == [TextPart(REASONING, -1, "abc")]
