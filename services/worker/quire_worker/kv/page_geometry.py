"""What a page is: its groups, layout and bytes, and the namespace that names all of that together with the model.

It knows nothing of who holds which page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire_common.pages import namespace_digest
from quire_worker.model.arch_spec import ArchSpec

Retention = Literal["full", "sliding_window", "recurrent", "draft"]

LAYOUT = "kv_head.layer.kv.token.dim"
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class KvGroup:
    """One kind of state that a model keeps per token."""

    name: str
    retention: Retention
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    page_size: int
    window: int = 0
    layout: str = LAYOUT

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """[kv_head, layer, key or value, token, dim]: a page is contiguous, one copy."""
        return (self.kv_heads, self.layers, 2, self.page_size, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        numbers = self.kv_heads * self.layers * 2 * self.page_size * self.head_dim
        return numbers * _DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """The pages of one model on one kind of device."""

    page_size: int
    """Tokens per page."""
    groups: tuple[KvGroup, ...]
    namespace: bytes
    """sha256 over model digest, dtype, layout and page size: the first part of a page's key. Never the rank."""


def kv_groups(spec: ArchSpec, page_size: int, dtype: str) -> tuple[KvGroup, ...]:
    """The groups that a spec implies. Layers with a window keep all pages in the full group and are masked."""
    return (KvGroup("full", "full", spec.layers, spec.kv_heads, spec.head_dim, dtype, page_size),)


def page_geometry(spec: ArchSpec, page_size: int, dtype: str, model_digest: bytes) -> PageGeometry:
    """Geometry and namespace of a model's pages. The digest covers config.json, hence all shapes."""
    groups = kv_groups(spec, page_size, dtype)
    layout = ";".join(f"{group.name}:{group.layout}" for group in groups)
    return PageGeometry(page_size, groups, namespace_digest(spec.architecture, model_digest, dtype, layout, page_size))
