"""Requests that hang or kill tokenizers: one that was being worked on as two were lost is failed, not tried at a third.

What was sent and not answered when a tokenizer was lost is suspected. It is tried once more, alone: of rows, nothing
else of the session is in flight then. A suspect that is answered is cleared.
"""

from __future__ import annotations

from quire_common.errors import Internal

MOST_LOST = 2


def loses_tokenizers() -> Internal:
    """Make the error for a request that has lost too many tokenizers."""
    return Internal(
        "TOKENIZER_LIMIT",
        f"{MOST_LOST} tokenizers in a row were lost while they worked on this request.",
        "Do not send it again as it is: report it with its request id.",
    )
