"""The fields of the bodies of the console's actions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_router.front.parameters.fields import Field

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_NAME_CHARS = 256
# The largest integer that a JavaScript number represents exactly.
_MAX_NUMBER = 2**53 - 1
_INSTANCE = Field("string", max_items=_MAX_NAME_CHARS)

CANCEL: Mapping[str, Field] = {
    "number": Field("int", low=1, high=_MAX_NUMBER),
    "request_id": Field("string", max_items=_MAX_NAME_CHARS),
}
DRAIN: Mapping[str, Field] = {"instance": _INSTANCE}
ROLE: Mapping[str, Field] = {"instance": _INSTANCE, "role": Field("string", max_items=_MAX_NAME_CHARS)}
# An action on the router itself has no fields.
ROUTER: Mapping[str, Field] = {}
