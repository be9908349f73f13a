"""Names that clients may ask for, and the models that they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.errors import NotFound
from quire_router.replicas.fleet import no_replica

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quire_common.credit.hello import ModelInfo, SamplingDefaults


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model under the name that the client used."""

    name: str
    model: ModelInfo


class Catalog:
    """With names from the flag, all of them mean the first model; without, models go by their own names."""

    def __init__(self, names: Sequence[str], models: Callable[[], Sequence[ModelInfo]]) -> None:
        self._names = tuple(names)
        self._models = models

    def served(self) -> list[ServedModel]:
        """Return all models that can be asked for, under their names; none while no engine has reported a model."""
        models = self._models()
        if self._names and models:
            return [ServedModel(name, models[0]) for name in self._names]
        return [ServedModel(model.name, model) for model in models]

    def sampling_defaults(self, name: str) -> SamplingDefaults:
        """Return the sampling defaults of the model of this name, as `resolve` finds it; none where there is no such
        model."""
        found = (each.model for each in self.served() if not name or each.name == name)
        model = next(found, None)
        return model.sampling_defaults if model is not None else ()

    def resolve(self, name: str) -> ServedModel:
        """Return the model of this name; '' means the first one. Raises NotFound, or Unavailable while no model is
        known."""
        served = self.served()
        if not served:
            raise no_replica()
        if not name:
            return served[0]
        for candidate in served:
            if candidate.name == name:
                return candidate
        known = ", ".join(candidate.name for candidate in served)
        raise NotFound(
            "MODEL_NOT_FOUND",
            f"The model `{name[:200]}` does not exist here.",
            f"Ask for one of: {known}; see /v1/models.",
            param="model",
        )
