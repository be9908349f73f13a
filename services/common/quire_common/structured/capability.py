"""The capability `structured_output:llguidance-VERSION`, with which workers say which constraints they apply.

A worker applies constraints of its own version of llguidance alone. Routers and workers refuse others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from quire_common.errors import Unsupported
from quire_common.structured.constraint import CONSTRAINT_PARAM, LLGUIDANCE_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quire_common.structured.constraint import Constraint

_CAPABILITY: Final = "structured_output:"
_LIBRARY: Final = "llguidance-"
STRUCTURED_OUTPUT: Final = f"{_CAPABILITY}{_LIBRARY}{LLGUIDANCE_VERSION}"
"""The capability of workers of this release."""


def capability_for(constraint: Constraint) -> str:
    """Return the capability that a worker needs to apply a constraint."""
    return f"{_CAPABILITY}{_LIBRARY}{constraint.version}"


def structured_outputs_in(capabilities: Iterable[str]) -> tuple[str, ...]:
    """Return the capabilities that concern structured output."""
    return tuple(each for each in capabilities if each.startswith(_CAPABILITY))


def check_capable(capabilities: Iterable[str], constraint: Constraint | None = None) -> None:
    """Raise Unsupported if workers with these capabilities cannot apply a constraint; None: if they cannot apply
    any."""
    found = structured_outputs_in(capabilities)
    if not found:
        raise Unsupported(
            "STRUCTURED_OUTPUT_UNSUPPORTED",
            "The engine of this model cannot apply grammars.",
            "Leave the constraint out, or run workers of a release that has structured output.",
            param=CONSTRAINT_PARAM,
        )
    if constraint is not None and capability_for(constraint) not in found:
        versions = " and ".join(each.removeprefix(_CAPABILITY) for each in found)
        raise Unsupported(
            "STRUCTURED_OUTPUT_UNSUPPORTED",
            f"The engine applies grammars of {versions}, this request has one of {_LIBRARY}{constraint.version}.",
            "Deploy tokenizers and workers of one release.",
            param=CONSTRAINT_PARAM,
        )
