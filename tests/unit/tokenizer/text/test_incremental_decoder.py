from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from quire_tokenizer.detokenize.incremental_decoder import TableDecoder, TextDecoder, WindowDecoder
from quire_tokenizer.model_folder import ModelFolder
from quire_tokenizer.vocabulary import Vocabulary
from tests.tiers import examples
from tests.unit.tokenizer import folders

IDS = st.lists(st.integers(0, 470), max_size=30)
TEXTS = st.lists(
    st.sampled_from([*" \n", "hello", "汉字", "你", "😀", "👩‍👩‍👧", "é", "END", "<s>", "▁", "\ufffd"])
    | st.text(max_size=5)
)


def run(decoder: TextDecoder, ids: list[int]) -> tuple[list[str], str]:
    return [decoder.feed(i) for i in ids], decoder.flush()


def make(vocabulary: Vocabulary, skip: bool) -> TextDecoder:
    return vocabulary.decoder(skip_special_tokens=skip, spaces_between_special_tokens=True)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "word_piece"])
@examples(300)
@given(ids=IDS, skip=st.booleans())
def test_any_ids_give_the_whole_text(
    vocabularies: dict[str, Vocabulary], kind: str, ids: list[int], skip: bool
) -> None:
    vocabulary = vocabularies[kind]
    parts, last = run(make(vocabulary, skip), ids)
    assert "".join(parts) + last == vocabulary.tokenizer.decode(ids, skip_special_tokens=skip)


@examples(300)
@given(ids=IDS, skip=st.booleans())
@example(ids=[37, 133], skip=False)  # a space and a bad byte
def test_byte_fallback_keeps_good_characters_beside_bad_bytes(
    vocabularies: dict[str, Vocabulary], ids: list[int], skip: bool
) -> None:
    """The library spoils a whole run of bytes for one bad one; characters that were sent cannot be taken back."""
    vocabulary = vocabularies["byte_fallback"]
    parts, last = run(make(vocabulary, skip), ids)
    text, whole = "".join(parts) + last, vocabulary.tokenizer.decode(ids, skip_special_tokens=skip)
    assert (text == whole) if "\ufffd" not in whole else ("\ufffd" in text)
    # Bytes of whole characters are as many U+FFFD in the library's text; bad bytes are one U+FFFD each in both.
    assert re.fullmatch(re.sub("\ufffd+", "(?s:.*)", re.escape(whole)), text)
    bytes_of_text = sum(len(c.encode()) if c != "\ufffd" else 1 for c in spoiled(text, whole))
    # A space that begins the text is stripped; in a spoiled run the library does not see that it is one.
    stripped = whole.startswith("\ufffd") and whole.count("\ufffd") == bytes_of_text + 1
    shown = [i for i in ids if vocabulary.tokenizer.id_to_token(i) and i not in skipped(vocabulary, skip)]
    first = shown[0] if shown else None
    assert stripped <= (first == vocabulary.tokenizer.token_to_id("<0x20>"))
    assert whole.count("\ufffd") == bytes_of_text + stripped


def skipped(vocabulary: Vocabulary, skip: bool) -> set[int | None]:
    return {vocabulary.tokenizer.token_to_id(token) for token in folders.SPECIALS} if skip else set()


def spoiled(text: str, whole: str) -> str:
    """What of `text` is U+FFFD in `whole`: both are equal but for such runs."""
    pattern = re.sub("\ufffd+", "((?s:.*?))", re.escape(whole))
    match = re.fullmatch(pattern, text)
    assert match is not None
    return "".join(match.groups())


@pytest.mark.parametrize("kind", folders.KINDS)
@examples(200)
@given(pieces=TEXTS)
def test_no_half_characters(vocabularies: dict[str, Vocabulary], kind: str, pieces: list[str]) -> None:
    vocabulary = vocabularies[kind]
    ids = vocabulary.tokenizer.encode("".join(pieces), add_special_tokens=False).ids
    whole = vocabulary.tokenizer.decode(ids, skip_special_tokens=False)
    parts, last = run(make(vocabulary, False), ids)
    assert "".join(parts) + last == whole
    assert last in ("", "\ufffd") or kind == "word_piece"
    sent = ""
    for part in parts:
        sent += part
        assert whole.startswith(sent)


def test_characters_come_with_their_last_token(vocabulary: Vocabulary) -> None:
    decoder = make(vocabulary, False)
    by_byte = [folders.token_id(vocabulary, c) for c in "ðŁĺĢ"]  # the bytes of an emoji as byte-level BPE spells them
    assert [decoder.feed(i) for i in by_byte] == ["", "", "", "😀"]
    assert decoder.flush() == ""
    assert [decoder.feed(i) for i in by_byte[:3]] == ["", "", ""]
    assert decoder.flush() == "\ufffd"


def test_tables_are_used_where_they_can_be(vocabularies: dict[str, Vocabulary]) -> None:
    assert {kind: type(make(v, True)) for kind, v in vocabularies.items()} == {
        "byte_level": TableDecoder,
        "byte_fallback": TableDecoder,
        "metaspace": TableDecoder,
        "word_piece": WindowDecoder,
    }


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Replace("▁", "_"), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Sequence([decoders.ByteLevel()]),
        decoders.Metaspace(prepend_scheme="never"),
        decoders.Metaspace(prepend_scheme="first"),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    ],
    ids=str,
)
@examples(30)
@given(pieces=TEXTS)
def test_other_decoders(decoder: decoders.Decoder | None, pieces: list[str]) -> None:
    tokenizer = Tokenizer.from_str(folders.tokenizer_json("metaspace"))
    if decoder is not None:
        tokenizer.decoder = decoder
    vocabulary = Vocabulary(ModelFolder("m", tokenizer.to_str().encode(), {}, (), {}))
    ids = tokenizer.encode("".join(pieces)).ids
    parts, last = run(make(vocabulary, True), ids)
    assert "".join(parts) + last == vocabulary.tokenizer.decode(ids, skip_special_tokens=True)


def test_adjacent_special_tokens_with_and_without_spaces(vocabularies: dict[str, Vocabulary]) -> None:
    """Only where the decoder itself puts spaces between tokens is there anything to leave out."""
    ids = [1, 2, folders.token_id(vocabularies["word_piece"], "hello")]
    for spaces, text in ((True, "<s> </s> hello"), (False, "<s></s> hello")):
        decoder = vocabularies["word_piece"].decoder(skip_special_tokens=False, spaces_between_special_tokens=spaces)
        assert "".join(run(decoder, ids)[0]) == text
    byte_level = vocabularies["byte_level"].decoder(skip_special_tokens=False, spaces_between_special_tokens=True)
    assert "".join(run(byte_level, [1, 2])[0]) == "<s></s>"


def test_a_window_stays_short_whatever_comes(vocabularies: dict[str, Vocabulary]) -> None:
    class Broken:
        """Every token is a broken character."""

        longest = 0

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            self.longest = max(self.longest, len(ids))
            return "\ufffd" * len(ids)

    broken = Broken()
    decoder = WindowDecoder(broken)  # type: ignore[arg-type]  # only decode is used
    parts, last = run(decoder, [1] * 1000)
    assert "".join(parts) + last == "\ufffd" * 1000
    assert broken.longest < 200


class Measured:
    """A tokenizer that notes the longest list of ids it was to decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.longest = 0
        self.id_to_token = tokenizer.id_to_token
        self._decode = tokenizer.decode

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        self.longest = max(self.longest, len(ids))
        return self._decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "word_piece"])
@examples(100)
@given(ids=IDS, gap=st.integers(0, 500))
def test_ids_beyond_the_vocabulary_do_not_lengthen_a_window(
    vocabularies: dict[str, Vocabulary], kind: str, ids: list[int], gap: int
) -> None:
    tokenizer = vocabularies[kind].tokenizer
    measured = Measured(tokenizer)
    decoder = WindowDecoder(measured)  # type: ignore[arg-type]  # only two methods are used
    known = [i for i in ids if tokenizer.id_to_token(i) is not None]
    # After a part of a character, 64 tokens of any kind end the wait for the rest.
    gaps = [0 if tokenizer.decode([i]).endswith("\ufffd") else gap for i in known]
    wide = [1 << 30] * gap + [i for one, more in zip(known, gaps, strict=True) for i in [one, *[1 << 30] * more]]
    parts, last = run(decoder, wide)
    plain, rest = run(WindowDecoder(tokenizer), known)
    assert "".join(parts) + last == "".join(plain) + rest
    assert measured.longest < 200


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
def test_token_bytes(vocabularies: dict[str, Vocabulary], kind: str) -> None:
    vocabulary = vocabularies[kind]
    text = "hello 你好 😀 the dog"
    ids = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(map(vocabulary.token_bytes, ids)).decode().strip() == text
    assert vocabulary.token_bytes(4) == b"<|im_end|>"
    assert vocabulary.token_bytes(vocabulary.size) == b""
    assert vocabulary.token_bytes(-1) == b""


def test_a_byte_is_a_byte(vocabulary: Vocabulary) -> None:
    assert vocabulary.token_bytes(folders.token_id(vocabulary, "ð")) == b"\xf0"
