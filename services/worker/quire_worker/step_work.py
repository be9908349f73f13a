"""StepWork: how many floating-point operations a step takes, and how many bytes it must read and write, by the model's
sizes. This module knows neither time nor device: what a device achieved is this over the time of its steps."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from quire_worker.model.arch_spec import ArchSpec
from quire_worker.model.parameters import MODEL_WIDE, parameter_specs

if TYPE_CHECKING:
    from quire_common.credit import PageGeometry
    from quire_worker.model.arch_spec import DecoderSpec
    from quire_worker.step import StepSize


@dataclass(frozen=True, slots=True)
class StepWork:
    """Multiplications and additions count as one operation each. Norms, activations and sampling are left out: they
    are some hundredths of a step."""

    flops_per_token: float
    flops_per_sample: float
    flops_per_pair: float
    weight_bytes: float
    """Read once a step: all weights, but of an embedding that is no output head too only single rows."""
    kv_bytes_per_token: float

    @classmethod
    def of(cls, spec: ArchSpec, pages: PageGeometry, stored_bytes: int) -> StepWork:
        """Return the work of a model whose weights take `stored_bytes` in all. Each weight of a layer's linear costs
        two operations a token, each of the output head two a sample. A pair costs four for each query dimension. An
        embedding that is not the output head too does not count as read."""
        specs = parameter_specs(spec)
        sizes = {(each.role, each.layer): prod(each.shape) for each in specs}
        linear = sum(
            prod(each.shape)
            for each in specs
            if each.layer != MODEL_WIDE and each.role.endswith(".weight") and each.shape[1:]
        )
        embedding = sizes["embed.weight", MODEL_WIDE]
        unread = 0 if spec.tied_embeddings else embedding
        return cls(
            flops_per_token=2.0 * linear,
            flops_per_sample=2.0 * embedding,
            flops_per_pair=4.0 * sum(each.query_size for each in spec.attention),
            weight_bytes=stored_bytes * (1 - unread / sum(sizes.values())),
            kv_bytes_per_token=sum(group.page_bytes for group in pages.groups) / pages.page_size,
        )

    def flops(self, size: StepSize) -> float:
        """Return the floating-point operations of a step."""
        return (
            self.flops_per_token * size.tokens + self.flops_per_sample * size.sampled + self.flops_per_pair * size.pairs
        )

    def num_bytes(self, size: StepSize) -> float:
        """Return the bytes of weights, keys and values that a step reads and writes."""
        return self.weight_bytes + self.kv_bytes_per_token * (size.context + size.tokens)


def known_work(spec: DecoderSpec, pages: PageGeometry, stored_bytes: int) -> StepWork | None:
    """Return the work of a model; None where transformers computes the layers, since nobody says how many of their
    weights a token uses."""
    return StepWork.of(spec, pages, stored_bytes) if isinstance(spec, ArchSpec) else None
