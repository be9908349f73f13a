"""A second face of the tokenizer, to which special tokens' text is text.

It shares the model (so it costs no memory), but in it each special token goes by a secret name: the token's text behind
a mark drawn at random when the process started. Nobody outside can write such a name, so text that came from a user
never becomes a special token; where a chat template wrote one, the caller says so and the name is put in. Everything
else (normalising, cutting words, the spaces around special tokens) is the library's own work on the whole text, hence
exactly what the plain tokenizer would do. Tokens that are added but not special, such as <think>, keep their names.
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
    """Encodes text as text. Thread-safe: nothing changes after construction."""

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
        """Encode texts in which only names behind the secret mark are special tokens; `add_special_tokens` puts bos and
        the like around each. Raises InvalidArgument for a special token's text that the model would still take for the
        token."""
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
        """Encode a text in which the given spans, in order, are special tokens. Nothing is put around it."""
        parts, position = [], 0
        for start, _ in specials:
            parts += [text[position:start], self._mark]
            position = start
        parts.append(text[position:])
        return self.encode_batch(["".join(parts)], add_special_tokens=False)[0]

    def _add_names(self, added: Mapping[int, AddedToken]) -> NDArray[np.int32]:
        """Give the added tokens ids of our own from `_base` on, and return the real id of each.

        Fillers keep these ids apart from all real ones: post-processors add tokens by their real ids.
        """
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
        """Split the special tokens in the text behind their first character, so that they stay text, but not those that
        the template wrote."""
        parts, at = list[str](), 0
        for start, _end in leaks.spans(text):
            if not text.startswith(self._mark, max(0, start - len(self._mark)), start):
                parts += [text[at : start + 1], self._split]
                at = start + 1
        return "".join([*parts, text[at:]])

    def _find_leaks(self, specials: Mapping[int, str]) -> tuple[TextMatcher | None, frozenset[int]]:
        """Find special tokens that the model itself makes of their text, as Unigram does. Returns a matcher of their
        texts, or None, and their ids."""
        unigram = isinstance(self._tokenizer.model, Unigram)
        # Of these the model makes what it does not know; that is no leak.
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
        """Replace our own ids by the real ones, and drop those of split marks."""
        resolved = np.asarray(ids, np.int32)
        own = resolved >= self._base
        if own.any():
            resolved[own] = self._real_ids[resolved[own] - self._base]
            resolved = resolved[resolved != _NO_TOKEN]
        return resolved
