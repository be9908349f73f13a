"""A second tokenizer over the same model, which encodes the text of special tokens as ordinary text.

The guarded tokenizer shares the model, so it needs no further memory. In it, each special token has a secret name: the
token's text after a mark that is chosen at random when the process starts. No user can write such a name, so text from
a user never becomes a special token. If a chat template wrote a special token, the caller passes its position, and the
guarded tokenizer inserts the mark there. The library does all other work (normalising, splitting words, the spaces
around special tokens) on the whole text, so the result is exactly that of the plain tokenizer. Added tokens that are
not special, such as <think>, keep their names.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import Unigram

from quire_common.errors import InvalidArgument
from quire_tokenizer.detokenize.text_matcher import TextMatcher

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

_NO_TOKEN = -1
# A character that no model has learnt.
_UNKNOWN = chr(0x10FFFE)


class GuardedTokenizer:
    """Encodes text without making special tokens of it. Thread-safe, because nothing changes after construction."""

    def __init__(self, tokenizer: Tokenizer, tokens: Mapping[int, str], added: Mapping[int, AddedToken]) -> None:
        self._mark = f"\ue000{secrets.token_hex(8)}\ue001"
        self._split = f"{self._mark}split"
        self._tokenizer = Tokenizer(tokenizer.model)
        if tokenizer.normalizer is not None:
            self._tokenizer.normalizer = tokenizer.normalizer
        if tokenizer.pre_tokenizer is not None:
            self._tokenizer.pre_tokenizer = tokenizer.pre_tokenizer
        if tokenizer.post_processor is not None:
            self._tokenizer.post_processor = tokenizer.post_processor
        self._base = max(tokens, default=-1) + 1
        self._real_ids = self._add_names(added)
        specials = {i: token.content for i, token in added.items() if token.special}
        self._leaks, self._leaking = self._find_leaks(specials)

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[NDArray[np.int32]]:
        """Encode texts in which only names after the secret mark are special tokens. With `add_special_tokens`, special
        tokens such as bos are added around each text. Raises InvalidArgument if a text has the text of a special token
        in a form that the model would still take for this token."""
        if self._leaks is not None:
            texts = [self._without_leaks(text, self._leaks) for text in texts]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        if self._leaks is not None and any(not self._leaking.isdisjoint(encoding.ids) for encoding in encodings):
            raise InvalidArgument(
                "SPECIAL_TOKEN_IN_TEXT",
                "The text holds a special token in a form that this model's tokenizer cannot take as text.",
                "Remove it, or allow special tokens.",
            )
        if add_special_tokens:
            encodings = [self._tokenizer.post_process(encoding) for encoding in encodings]
        return [self._resolve(encoding.ids) for encoding in encodings]

    def encode_marked(self, text: str, specials: Sequence[tuple[int, int]]) -> NDArray[np.int32]:
        """Encode a text in which the given spans, in order, are special tokens, by a secret mark before each. No
        special tokens are added around the text. Raises InvalidArgument as `encode_batch` does."""
        parts, position = [], 0
        for start, _ in specials:
            parts += [text[position:start], self._mark]
            position = start
        parts.append(text[position:])
        return self.encode_batch(["".join(parts)], add_special_tokens=False)[0]

    def _add_names(self, added: Mapping[int, AddedToken]) -> NDArray[np.int32]:
        """Add the added tokens to this tokenizer, with ids from `_base` on; special tokens get their secret names.
        Returns the real id for each of these ids, _NO_TOKEN for the split mark. Fillers keep these ids apart from all
        real ones: post-processors add tokens by their real ids."""
        fillers = self._base - self._tokenizer.get_vocab_size()
        names = [AddedToken(f"{self._mark}filler{n}", normalized=False) for n in range(fillers)]
        real = {self._split: _NO_TOKEN}
        for i, token in sorted(added.items()):
            name = self._mark + token.content if token.special else token.content
            real[name] = i
            names.append(
                AddedToken(
                    name,
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=token.special,
                )
            )
        self._tokenizer.add_tokens([*names, AddedToken(self._split, normalized=False)])
        ids = np.full(max(0, self._tokenizer.get_vocab_size() - self._base), _NO_TOKEN, np.int32)
        for name, i in real.items():
            own = self._tokenizer.token_to_id(name)
            if own is not None and own >= self._base:
                ids[own - self._base] = i
        return ids

    def _without_leaks(self, text: str, leaks: TextMatcher) -> str:
        """Insert a split mark after the first character of each special token's text, so that it stays text. The texts
        after the secret mark, which the template wrote, are left as they are."""
        parts, at = list[str](), 0
        for start, _end in leaks.spans(text):
            if not text.startswith(self._mark, max(0, start - len(self._mark)), start):
                parts += [text[at : start + 1], self._split]
                at = start + 1
        return "".join([*parts, text[at:]])

    def _find_leaks(self, specials: Mapping[int, str]) -> tuple[TextMatcher | None, frozenset[int]]:
        """Find the special tokens that the model itself would make of their text, as Unigram models do (all count for
        these); texts of one character and the tokens for unknown characters are left out. Returns a matcher for their
        texts (None if there are none), and their ids."""
        unigram = isinstance(self._tokenizer.model, Unigram)
        # The model makes these tokens of unknown characters, so they do not come from their own text.
        unknown = self._tokenizer.encode(_UNKNOWN, add_special_tokens=False).ids
        leaking = {
            i: text
            for i, text in specials.items()
            if len(text) > 1
            and i not in unknown
            and (unigram or i in self._tokenizer.encode(text, add_special_tokens=False).ids)
        }
        if not leaking:
            return None, frozenset()
        return TextMatcher(leaking.values()), frozenset(leaking)

    def _resolve(self, ids: list[int]) -> NDArray[np.int32]:
        """Replace the ids of this tokenizer by the real ids, and drop the ids of split marks."""
        resolved = np.asarray(ids, np.int32)
        own = resolved >= self._base
        if own.any():
            resolved[own] = self._real_ids[resolved[own] - self._base]
            resolved = resolved[resolved != _NO_TOKEN]
        return resolved
