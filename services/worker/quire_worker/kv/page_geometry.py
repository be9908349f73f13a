"""The geometry of a model's pages: their KV groups, layout and bytes, and the namespace that identifies it with the
model.

This module does not know which request holds which page.
"""

from __future__ import annotations

from quire_common.credit import KvGroup, PageGeometry
from quire_common.pages import namespace_digest
from quire_worker.model.arch_spec import DecoderSpec

LAYOUT = "kv_head.layer.kv.token.dim"
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}


def page_shape(group: KvGroup, page_size: int) -> tuple[int, int, int, int, int]:
    """[kv_head, layer, key or value, token, dim]: a page is contiguous, one copy."""
    return (group.kv_heads, group.layers, 2, page_size, group.head_dim)


def kv_group(layers: int, kv_heads: int, head_dim: int, dtype: str, page_size: int) -> KvGroup:
    """Return the group of layers that keep all pages of a sequence, with the bytes of a page: `page_size` keys and
    values of every layer and head. `dtype` is float32, bfloat16 or float8_e4m3fn."""
    page_bytes = kv_heads * layers * 2 * page_size * head_dim * _DTYPE_BYTES[dtype]
    return KvGroup("full", page_bytes, LAYOUT, dtype, layers, kv_heads, head_dim)


def kv_groups(spec: DecoderSpec, page_size: int, dtype: str) -> tuple[KvGroup, ...]:
    """The groups that a spec implies. Layers with a window keep all pages in the full group and are masked."""
    return (kv_group(len(spec.attention), spec.kv_heads, spec.head_dim, dtype, page_size),)


def page_geometry(spec: DecoderSpec, page_size: int, dtype: str, model_digest: bytes) -> PageGeometry:
    """Return the page size, KV groups and namespace of a model's pages. The namespace is the first part of a page's
    key: a sha256 over architecture, model digest, dtype, layout and page size. It never includes the rank. The model
    digest covers config.json, hence all shapes."""
    groups = kv_groups(spec, page_size, dtype)
    layout = ";".join(f"{group.name}:{group.layout}" for group in groups)
    return PageGeometry(page_size, groups, namespace_digest(spec.architecture, model_digest, dtype, layout, page_size))
