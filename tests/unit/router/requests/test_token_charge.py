"""A tenant is charged an estimate before a tokenizer works on its text, and then the number of tokens."""

from __future__ import annotations

import numpy as np
import pytest

from quire_common.errors import InvalidArgument, Overloaded, QuireError, Unavailable
from quire_router.requests.token_charge import charged
from quire_router.sequences.job import ChatPrompt, TextPrompt, TokenPrompt

PROMPTS = (TextPrompt("a" * 400), ChatPrompt("m" * 800, "t" * 40), TokenPrompt(np.arange(7, dtype=np.int32)))
ESTIMATE = 100 + 210 + 7


class Payer:
    def __init__(self) -> None:
        self.paid = 0

    def charge(self, tenant: str, tokens: int) -> None:
        assert tenant == "t"
        self.paid += tokens


def test_estimate_is_charged_first_and_settled_by_the_token_count() -> None:
    payer = Payer()
    with charged(payer.charge, "t", PROMPTS) as settle:
        assert payer.paid == ESTIMATE
        settle([3, 8, 9])
    assert payer.paid == 20


def test_refused_prompt_keeps_the_estimated_charge() -> None:
    payer = Payer()
    with pytest.raises(InvalidArgument), charged(payer.charge, "t", PROMPTS):
        raise InvalidArgument("PROMPT_TOO_LONG", "m", "f")
    assert payer.paid == ESTIMATE


def test_charge_is_capped_at_the_encodable_tokens() -> None:
    payer = Payer()
    with charged(payer.charge, "t", PROMPTS, most=50) as settle:
        assert payer.paid == 50 + 50 + 7
        settle([60, 8, 9])
    assert payer.paid == 50 + 8 + 9


@pytest.mark.parametrize("error", [Unavailable("NO_TOKENIZER", "m", "f"), Overloaded("TOKENIZER_OVERLOADED", "m", "f")])
def test_nothing_is_charged_if_no_tokenizer_works(error: QuireError) -> None:
    payer = Payer()
    with pytest.raises(type(error)), charged(payer.charge, "t", PROMPTS):
        raise error
    assert payer.paid == 0
