from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_common.errors import InvalidArgument
from quire_tokenizer.vocabulary import Vocabulary
from tests.tiers import examples
from tests.unit.tokenizer import folders

MARKUP = re.compile("|".join(map(re.escape, folders.SPECIALS)))
PIECES = st.sampled_from(
    [*folders.SPECIALS, "<think>", "<|im_", "end|>", "</", "s>", " ", "  ", "\n", "hello", "é", "汉字", "😀", "x"]
)
TEXTS = st.lists(PIECES | st.text(max_size=4), max_size=12).map("".join)


def ids_of(vocabulary: Vocabulary, text: str, add: bool = False) -> list[int]:
    result: list[int] = vocabulary.guarded.encode_batch([text], add_special_tokens=add)[0].tolist()
    return result


@pytest.mark.parametrize("kind", folders.KINDS)
@examples(150)
@given(text=TEXTS)
def test_user_text_never_becomes_a_special_token(vocabularies: dict[str, Vocabulary], kind: str, text: str) -> None:
    vocabulary = vocabularies[kind]
    unknown = vocabulary.tokenizer.token_to_id("<unk>")
    assert not set(ids_of(vocabulary, text)) & (vocabulary.specials.keys() - {unknown})


@examples(150)
@given(text=TEXTS)
def test_byte_level_text_survives(vocabulary: Vocabulary, text: str) -> None:
    assert vocabulary.tokenizer.decode(ids_of(vocabulary, text), skip_special_tokens=False) == text


@pytest.mark.parametrize("kind", folders.KINDS)
@examples(150)
@given(text=TEXTS)
def test_marked_specials_are_what_the_plain_tokenizer_makes(
    vocabularies: dict[str, Vocabulary], kind: str, text: str
) -> None:
    vocabulary = vocabularies[kind]
    spans = [match.span() for match in MARKUP.finditer(text)]
    plain = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    assert vocabulary.guarded.encode_marked(text, spans).tolist() == plain


@pytest.mark.parametrize("kind", folders.KINDS)
@pytest.mark.parametrize("add", [True, False])
def test_ordinary_text_is_encoded_as_ever(vocabularies: dict[str, Vocabulary], kind: str, add: bool) -> None:
    vocabulary = vocabularies[kind]
    for text in [*folders.CORPUS, "", " ", "<think>so</think>"]:
        assert ids_of(vocabulary, text, add) == vocabulary.tokenizer.encode(text, add_special_tokens=add).ids


def test_one_special_token_of_two(vocabulary: Vocabulary) -> None:
    text = "a<|im_end|>b<|im_end|>c"
    ids = vocabulary.guarded.encode_marked(text, [(12, 22)]).tolist()
    assert ids.count(4) == 1
    assert vocabulary.tokenizer.decode(ids[: ids.index(4)], skip_special_tokens=False) == "a<|im_end|>b"


def test_the_library_would_take_it_for_the_token(vocabulary: Vocabulary) -> None:
    """The danger is real: without the guard, the text is the token."""
    assert 4 in vocabulary.tokenizer.encode("hi<|im_end|>").ids


def test_a_special_token_in_another_script_form(vocabularies: dict[str, Vocabulary]) -> None:
    """NFKC makes </s> of its full-width form, and Unigram would make the token of that."""
    vocabulary = vocabularies["metaspace"]
    assert 2 in vocabulary.tokenizer.encode("hi＜/s＞", add_special_tokens=False).ids
    with pytest.raises(InvalidArgument, match="SPECIAL_TOKEN_IN_TEXT"):
        ids_of(vocabulary, "hi＜/s＞")
