"""The registry of a process's metrics. At each scrape, it adds the label `model_name` for a service with one model, and
aliases, which repeat a metric under another system's name. So counting stays as cheap as without them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import RestrictedRegistry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from prometheus_client.samples import Sample

MODEL_LABEL = "model_name"
# The suffix of creation timestamps, which aliases leave out.
_CREATED = "_created"


@dataclass(frozen=True, slots=True)
class Alias:
    """`source` and `name` are names of metric families; a counter's name lacks its `_total`. Labels in `without` are
    removed, and the samples that differ only in them are summed. `labels` are added to every sample."""

    source: str
    name: str
    without: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


class MetricsRegistry(CollectorRegistry):
    """Reading is safe from any thread."""

    def __init__(self) -> None:
        super().__init__()
        self._models: dict[str, str] = {}
        self._aliases: dict[str, tuple[Alias, ...]] = {}

    def name_model(self, prefix: str, model: str) -> None:
        """Give all samples of metrics whose names begin with `prefix` the label `model_name` from now on."""
        self._models = {**self._models, prefix: model}

    def add_aliases(self, aliases: Iterable[Alias]) -> None:
        """Repeat metrics under other names at each scrape from now on. An alias that was added before is ignored."""
        known = dict(self._aliases)
        for alias in aliases:
            before = known.get(alias.source, ())
            if alias not in before:
                known[alias.source] = (*before, alias)
        self._aliases = known

    def collect(self) -> Iterator[Metric]:
        """Yield each family of metrics, with the label `model_name` where `name_model` asks for it (by the prefix that
        was named first), and after it its aliases. An alias has the same numbers under other names, summed over the
        labels that it removes."""
        models, aliases = self._models, self._aliases
        for family in super().collect():
            model = next((name for prefix, name in models.items() if family.name.startswith(prefix)), None)
            if model is not None:
                family.samples[:] = [_labelled(sample, model) for sample in family.samples]
            yield family
            for alias in aliases.get(family.name, ()):
                yield _repeated(family, alias)

    def restricted_registry(self, names: Iterable[str]) -> RestrictedRegistry:
        """Return a view of the samples with these names, for `/metrics?name[]=`: as `collect` yields them, with the
        model's label and with aliases."""
        return _RestrictedRegistry(self, frozenset(names))


class _RestrictedRegistry(RestrictedRegistry):
    def __init__(self, registry: MetricsRegistry, names: frozenset[str]) -> None:
        super().__init__(names, registry)
        self._whole = registry
        self._names = names

    def collect(self) -> Iterator[Metric]:
        """Yield each family, aliases included, that has samples with the wanted names, reduced to these samples."""
        for family in self._whole.collect():
            samples = [sample for sample in family.samples if sample.name in self._names]
            if samples:
                # A new family: the aliases repeat all samples of the old one.
                restricted = Metric(family.name, family.documentation, family.type)
                restricted.samples = samples
                yield restricted


def _labelled(sample: Sample, model: str) -> Sample:
    return sample._replace(labels={**sample.labels, MODEL_LABEL: model})


def _repeated(family: Metric, alias: Alias) -> Metric:
    """Return the family under the alias's name and with the alias's labels added. Labels in `without` are removed, and
    samples that then are alike are summed. Creation timestamps are left out."""
    repeated = Metric(alias.name, family.documentation, family.type)
    samples = [sample for sample in family.samples if not sample.name.endswith(_CREATED)]
    if alias.without:
        samples = _summed(samples, alias.without)
    repeated.samples += [
        sample._replace(
            name=alias.name + sample.name.removeprefix(family.name), labels={**sample.labels, **alias.labels}
        )
        for sample in samples
    ]
    return repeated


def _summed(samples: Sequence[Sample], without: Sequence[str]) -> list[Sample]:
    """Remove the labels in `without`, and sum the samples that differ only in them."""
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], Sample] = {}
    for sample in samples:
        labels = {name: value for name, value in sample.labels.items() if name not in without}
        key = sample.name, tuple(sorted(labels.items()))
        before = sums[key].value if key in sums else 0.0
        sums[key] = sample._replace(labels=labels, value=before + sample.value)
    return list(sums.values())
