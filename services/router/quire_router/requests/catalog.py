"""The model names that clients may use, and the model behind each name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.errors import NotFound, PermissionDenied
from quire_router.replicas.fleet import no_replica

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quire_common.credit.hello import ModelInfo, SamplingDefaults
    from quire_router.principal import KeyLimits


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model under the name that the client used."""

    name: str
    model: ModelInfo


class Catalog:
    """The models that this router serves. If `names` (from the command line) is not empty, each of these names means
    the first model. Otherwise each model has its own name."""

    def __init__(self, names: Sequence[str], models: Callable[[], Sequence[ModelInfo]]) -> None:
        self._names = tuple(names)
        self._models = models

    def served(self, limits: KeyLimits) -> list[ServedModel]:
        """Return all models that a key with these limits may use, one entry per name. The list is empty until an engine
        has reported a model."""
        return _allowed(self._all(), limits)

    def public_name(self, model: str) -> str:
        """Return the first name under which clients can use the model whose own name is `model`. Returns `model` itself
        if clients cannot use this model."""
        return next((served.name for served in self._all() if served.model.name == model), model)

    def sampling_defaults(self, limits: KeyLimits) -> dict[str, SamplingDefaults]:
        """Return the sampling defaults of all models that have some and that a key with these limits may use, by the
        names for which `resolve` finds the models. '' is the first model that the key may use, not always the router's
        first; it is missing if that model has no defaults."""
        served = self.served(limits)
        found: dict[str, SamplingDefaults] = {}
        for each in reversed(served):  # of several models with one name, the first counts
            if each.model.sampling_defaults:
                found[each.name] = each.model.sampling_defaults
        if served and served[0].model.sampling_defaults:
            found[""] = served[0].model.sampling_defaults
        return found

    def resolve(self, name: str, limits: KeyLimits) -> ServedModel:
        """Return the model with this name; '' means the first model that a key with these limits may use. Raises
        NotFound for an unknown name, PermissionDenied for a known model that the key may not use (or '' if it may use
        none), and Unavailable while no model is known."""
        everything = self._all()
        if not everything:
            raise no_replica()
        served = _allowed(everything, limits)
        if (not name and not served) or (name and not limits.allow_model(name) and name in _names(everything)):
            raise PermissionDenied(
                "MODEL_NOT_ALLOWED",
                f"This API key may not use {f'the model `{name}`' if name else 'any model of this server'}.",
                "Use another key, or add the model to `models` of this one in the key file.",
                param="model",
            )
        if not name:
            return served[0]
        for candidate in served:
            if candidate.name == name:
                return candidate
        known = ", ".join(_names(served))
        raise NotFound(
            "MODEL_NOT_FOUND",
            f"The model `{name[:200]}` does not exist here.",
            f"Ask for one of: {known}; see /v1/models.",
            param="model",
        )

    def _all(self) -> list[ServedModel]:
        """Return each public name with its model: the operator's names, all for the first model, or each model under
        its own name. Empty until an engine has reported a model."""
        models = self._models()
        if self._names and models:
            return [ServedModel(name, models[0]) for name in self._names]
        return [ServedModel(model.name, model) for model in models]


def _allowed(served: list[ServedModel], limits: KeyLimits) -> list[ServedModel]:
    """Return those models that a key with these limits may use."""
    return [each for each in served if limits.allow_model(each.name)] if limits.models else served


def _names(served: Sequence[ServedModel]) -> list[str]:
    return [each.name for each in served]
