"""Poison-request detection: a request at which two tokenizers in a row are lost fails instead of losing a third.

When a tokenizer is lost, the requests that it was working on become suspects. A suspect is retried alone: meanwhile its
Detokenize stream has no other message in flight, or its unary call is, if possible, the only one at that tokenizer. A
loss while other unary calls ran there too does not count against a suspect. An answer clears a suspect.
"""

from __future__ import annotations

from quire_common.errors import Internal

MOST_LOST = 2


def loses_tokenizers() -> Internal:
    """Make the error (Internal, TOKENIZER_LIMIT) for a request at which two tokenizers in a row were lost."""
    return Internal(
        "TOKENIZER_LIMIT",
        f"{MOST_LOST} tokenizers in a row were lost while they worked on this request.",
        "Do not send it again as it is: report it with its request id.",
    )
