"""Vocabulary: the model's tokenizer and all facts about it that are known from the start: ids, special tokens, pieces,
digest.

It is loaded once, never changes, and is shared by threads. It knows nothing of requests.
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from quire_common.errors import ConfigError
from quire_tokenizer.chat.thinking_marks import find_marks
from quire_tokenizer.detokenize.incremental_decoder import TableDecoder, TextDecoder, WindowDecoder
from quire_tokenizer.detokenize.token_pieces import BYTE_ALPHABET, build_pieces, byte_level_bytes
from quire_tokenizer.guarded_tokenizer import GuardedTokenizer
from quire_tokenizer.output_parsing.answer_parsers import choose_parsers
from quire_tokenizer.pipeline_steps import pipeline_steps
from quire_tokenizer.text_cutter import may_cut
from quire_tokenizer.text_growth import LARGEST_GROWTH, largest_growth

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tokenizers import AddedToken

    from quire_tokenizer.model_folder import ModelFolder
    from quire_tokenizer.output_parsing.answer_parsers import ParseOptions

# Ids are below this. The tables of a vocabulary have an entry for each id, so that one token with a huge id would fill
# the memory. The largest vocabularies of published models have about a million tokens.
MAX_VOCABULARY = 1 << 22
_NO_TOKENS: frozenset[int] = frozenset()
# A text that is encoded when a tokenizer is loaded.
_PROBE = "a"
# Composing characters shortens UTF-8 to a third at most (three Hangul letters to one syllable).
_NFC_SHRINKS = 3


class Vocabulary:
    """All that the services may ask about a model's tokens."""

    def __init__(
        self, folder: ModelFolder, reasoning_config: str = "", tool_parser: str = "", reasoning_parser: str = ""
    ) -> None:
        """`tool_parser` and `reasoning_parser` are names of parsers; "" means the parser that the chat templates
        indicate or, for reasoning, also the added tokens (see choose_parsers). `reasoning_config` is as in find_marks.
        Raises ConfigError if the tokenizer cannot be read or used, has no tokens or an id from MAX_VOCABULARY on, or
        can lengthen a text too much. Raises it also for an unknown parser and a malformed `reasoning_config`."""
        self.model = folder.name
        self.tokenizer = _load(folder)
        self._tokens = {i: text for text, i in self.tokenizer.get_vocab(with_added_tokens=True).items()}
        added = self.tokenizer.get_added_tokens_decoder()
        self._tokens.update({i: token.content for i, token in added.items()})
        if not self._tokens:
            raise ConfigError(
                "BAD_TOKENIZER",
                f"The tokenizer of {folder.tokenizer_file} has no tokens.",
                f"Download {folder.tokenizer_file} again.",
            )
        self.size = max(self._tokens) + 1
        if self.size > MAX_VOCABULARY:
            raise ConfigError(
                "BAD_TOKENIZER",
                f"{folder.tokenizer_file} has the token id {self.size - 1}; ids are less than {MAX_VOCABULARY}.",
                f"Download {folder.tokenizer_file} again.",
            )
        self.specials = {i: token.content for i, token in added.items() if token.special}
        self._special_ids = frozenset(self.specials)
        _check_growth(folder, self.tokenizer)
        with _typed_errors(folder):
            self.guarded = GuardedTokenizer(self.tokenizer, self._tokens, added)
            self.guarded.encode_batch([_PROBE], add_special_tokens=True)
        self.token_variables = dict(folder.token_variables)
        self.templates = dict(folder.templates)
        self.bos_id = self._id(self.token_variables.get("bos_token", ""))
        eos = (self._id(e) if isinstance(e, str) else e for e in folder.eos)
        self.eos_ids = frozenset(i for i in eos if i is not None)
        self.thinking = find_marks(self.tokenizer, reasoning_config)
        self.added = {token.content: i for i, token in added.items()}
        self.parsers = choose_parsers(
            self.added,
            "\n".join(self.templates.values()),
            tool_parser,
            reasoning_parser,
        )
        self._table = build_pieces(self.tokenizer, self._tokens)
        self.max_bytes_per_token = _max_bytes_per_token(self.tokenizer, self._tokens, added.values())
        self.may_cut = may_cut(
            pipeline_steps(self.tokenizer.pre_tokenizer), pipeline_steps(self.tokenizer.normalizer), added.values()
        )
        """Whether the pieces of text_cutter have the tokens of the whole text."""
        self.digest = _digest(folder)

    def decoder(
        self,
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
        parsing: ParseOptions | None = None,
    ) -> TextDecoder:
        """Return a new decoder for one sequence: one that uses the table of pieces if there is a table, else one that
        calls the library, which alone heeds `spaces_between_special_tokens`. If the answer's reasoning or tool calls
        are wanted and there is a parser for them, a ParsedDecoder around this decoder is returned. With
        `skip_special_tokens`, the parser still sees the special tokens that are its markers."""
        parsed = parsing if parsing is not None and self.parsers.wanted(parsing) else None
        markers = self.parsers.token_markers(parsed).keys() if parsed is not None else _NO_TOKENS
        skip = self._special_ids - markers if skip_special_tokens else _NO_TOKENS
        decoder: TextDecoder
        if self._table is not None:
            decoder = TableDecoder(self._table, skip)
        else:
            decoder = WindowDecoder(self.tokenizer, skip, self.specials, spaces_between_special_tokens)
        return decoder if parsed is None else self.parsers.wrap(decoder, parsed)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that this token adds in the middle of a text; no bytes for negative ids and ids beyond the
        vocabulary. Without a table of pieces, these are the bytes of the token decoded alone."""
        if not 0 <= token_id < self.size:
            return b""
        if self._table is None:
            return self.tokenizer.decode([token_id], skip_special_tokens=False).encode()
        piece = self._table.pieces[token_id]
        return piece.encode() if isinstance(piece, str) else piece

    def _id(self, text: str) -> int | None:
        return self.tokenizer.token_to_id(text) if text else None


def _load(folder: ModelFolder) -> Tokenizer:
    """Make the tokenizer from tokenizer.json, without truncation and padding. Raises ConfigError if the library cannot
    read it."""
    with _typed_errors(folder):
        tokenizer = Tokenizer.from_buffer(folder.tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@contextmanager
def _typed_errors(folder: ModelFolder) -> Iterator[None]:
    """Raise ConfigError instead of the errors of the library tokenizers, which finds some faults of a file only when it
    encodes. The library raises bare Exception, and PanicException, which is no Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(
            "BAD_TOKENIZER",
            f"The tokenizer of {folder.tokenizer_file} is unusable: {error}.",
            f"Download {folder.tokenizer_file} again, or name a folder with another tokenizer.json by --tokenizer.",
        ) from error


def _max_bytes_per_token(tokenizer: Tokenizer, tokens: Mapping[int, str], added: Iterable[AddedToken]) -> int:
    """Return how many UTF-8 bytes of a text one token can stand for, or 0 if there may be no bound. There is a bound
    only for byte-level tokenizers that know all bytes, have no pre-tokenizers but Split and Digits beside, none of
    which removes text, and no added token that strips white space. The normalizer NFC triples the bound; with any other
    normalizer there is none."""
    texts = {*tokens.values()}
    cutters = pipeline_steps(tokenizer.pre_tokenizer)
    if not any(c["type"] == "ByteLevel" for c in cutters) or not texts >= BYTE_ALPHABET:
        return 0
    if any(token.lstrip or token.rstrip for token in added):
        return 0
    if any(c["type"] not in ("ByteLevel", "Split", "Digits") or c.get("behavior") == "Removed" for c in cutters):
        return 0
    normalizers = [n["type"] for n in pipeline_steps(tokenizer.normalizer)]
    if not set(normalizers) <= {"NFC"}:
        return 0
    longest = max(len(byte_level_bytes(text)) for text in texts)
    return longest * (_NFC_SHRINKS if normalizers else 1)


def _check_growth(folder: ModelFolder, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if this tokenizer's steps can make a text more than LARGEST_GROWTH times longer when it encodes
    or decodes."""
    growth = max(
        largest_growth(pipeline_steps(tokenizer.normalizer) + pipeline_steps(tokenizer.pre_tokenizer)),
        largest_growth(pipeline_steps(tokenizer.decoder)),
    )
    if growth > LARGEST_GROWTH:
        raise ConfigError(
            "BAD_TOKENIZER",
            f"The steps of {folder.tokenizer_file} can make a text {growth:.0f} times longer or more; {LARGEST_GROWTH} "
            "times are accepted.",
            "Take out steps of `normalizer`, `pre_tokenizer` or `decoder` that lengthen a text.",
        )


def _digest(folder: ModelFolder) -> bytes:
    """Return the SHA-256 hash of tokenizer.json, and of the chat templates with their names. Each part is hashed with
    its length, so that no two sets of files give the same input."""
    digest = hashlib.sha256()
    for part in (folder.tokenizer_json, *(p.encode() for item in sorted(folder.templates.items()) for p in item)):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
