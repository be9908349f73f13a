"""Which engines apply which constraints: those with the version of llguidance for which a constraint was compiled."""

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
"""The capability of a model whose worker applies constraints of this version."""


def capability_for(constraint: Constraint) -> str:
    """The capability that a worker must have to apply a constraint."""
    return f"{_CAPABILITY}{_LIBRARY}{constraint.version}"


def structured_outputs_in(capabilities: Iterable[str]) -> tuple[str, ...]:
    """Those among capabilities that say how workers apply constraints; none where they do not."""
    return tuple(each for each in capabilities if each.startswith(_CAPABILITY))


def check_capable(capabilities: Iterable[str], constraint: Constraint | None = None) -> None:
    """Raise Unsupported where workers of these capabilities cannot apply a constraint; None: any constraint."""
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
