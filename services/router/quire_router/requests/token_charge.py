"""Charges a tenant for a text while a tokenizer works on it: an estimate first, then the number of its tokens.

So a long text counts before the work begins, and a text that is refused or cut off afterwards counts too.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from quire_common.errors import Overloaded, Unavailable
from quire_router.sequences.job import ChatPrompt, TokenPrompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from quire_router.sequences.job import Prompt

    Charge = Callable[[str, int], None]

# English text has about so many characters per token; other languages and code have fewer.
_CHARS_PER_TOKEN = 4


@contextlib.contextmanager
def charged(
    charge: Charge, tenant: str, prompts: Iterable[Prompt], *, most: int = 0
) -> Iterator[Callable[[Iterable[int]], None]]:
    """Context manager: charge an estimate of the prompts' tokens at once, and yield a function. The `with` block calls
    the function with the real lengths, which replace the estimates. If no tokenizer is available (Unavailable or
    Overloaded in the block), the charge is taken back; after any other error it stays.

    `most` is the greatest number of tokens that are charged for one prompt; 0: no bound. A longer prompt is refused
    when this number of its tokens has been encoded.
    """
    paid = 0

    def settle(lengths: Iterable[int]) -> None:
        """Replace all that was charged so far by the sum of these lengths, each counted as `most` tokens at most."""
        nonlocal paid
        tokens = sum(min(length, most) if most else length for length in lengths)
        if tokens != paid:
            charge(tenant, tokens - paid)
            paid = tokens

    settle(map(_estimate, prompts))
    try:
        yield settle
    except (Unavailable, Overloaded):
        settle(())
        raise


def _estimate(prompt: Prompt) -> int:
    """Estimate the number of a prompt's tokens: one for four characters of its text, or of a chat's messages and tools.
    The result is exact if the prompt consists of token ids."""
    if isinstance(prompt, TokenPrompt):
        return len(prompt.ids)
    if isinstance(prompt, ChatPrompt):
        return (len(prompt.messages_json) + len(prompt.tools_json)) // _CHARS_PER_TOKEN
    return len(prompt.text) // _CHARS_PER_TOKEN
