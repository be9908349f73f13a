"""Bad words at the router's bound are taken by a tokenizer and by engines, at their default settings."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import cast

import numpy as np
from numpy.typing import NDArray

from quire_common.logit_controls import LogitControls, check_controls
from quire_common.sequence import RequestContext
from quire_router.front.parameters.tables import SAMPLING
from quire_router.requests.encoder import Encoder as RouterEncoder
from quire_router.text.tokenizer_client import TokenizerClient
from quire_tokenizer.config import TokenizerConfig
from quire_tokenizer.encoder import Encoder
from quire_tokenizer.vocabulary import Vocabulary
from quire_tokenizer.work_pool import WorkPool


class DirectClient:
    """The router's client without gRPC between."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    async def encode(
        self, texts: Items[str], context: RequestContext, *, add_special_tokens: bool, max_tokens: int
    ) -> tuple[list[NDArray[np.int32]], int]:
        ids = await self._encoder.encode(
            texts, add_special_tokens=add_special_tokens, allow_special_tokens=False, max_tokens=max_tokens
        )
        return ids, 0


async def test_as_many_bad_words_as_a_request_may_have_are_taken(vocabulary: Vocabulary) -> None:
    config, pool = TokenizerConfig(), WorkPool(1, 8)
    encoder = Encoder(vocabulary, pool, max_texts=config.max_texts, max_text_bytes=config.max_text_bytes)
    router = RouterEncoder(cast(TokenizerClient, DirectClient(encoder)))
    words = ["ab"] * SAMPLING["bad_words"].max_items
    try:
        found = await router.bad_words(words, RequestContext("r"))
    finally:
        pool.close()
    assert len(found) >= len(words)
    check_controls(LogitControls(bad_words=tuple(found * (2 * len(words) // len(found)))))
