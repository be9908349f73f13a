"""Fills a ParameterStore from a GGUF file, hashing what it reads.

Knows names, shapes and the order of rotated rows; how blocks are read is `tensor_values`' business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from quire_common.errors import ConfigError
from quire_common.gguf import GgufModel, TensorPlace
from quire_common.gguf.block_kinds import BlockKind
from quire_worker.model.arch_spec import ArchSpec
from quire_worker.model.parameters import ParameterSpec
from quire_worker.threads.cores import usable_cores
from quire_worker.weights.gguf.architectures import ROPE_FACTORS, TENSOR_NAMES, find_architecture
from quire_worker.weights.gguf.tensor_values import check_readable, read_blocks, read_pieces
from quire_worker.weights.parameter_store import ParameterStore

MOST_THREADS = 8
_ROTATED = ("q.", "k.")
_FIX = "Download the file again, or convert the model with a current llama.cpp."


@dataclass(frozen=True, slots=True)
class _Load:
    """One tensor and where its values go."""

    place: TensorPlace
    target: Tensor
    """For its values; uint8: for its blocks, [rows, bytes of a row]."""
    head_dim: int
    """Of a tensor whose heads' rows are stored for RoPE of neighbours; 0: rows are as the decoder wants them."""


def load_gguf(
    model: GgufModel,
    specs: Sequence[ParameterSpec],
    spec: ArchSpec,
    store: ParameterStore,
    progress: Callable[[int, int], None],
) -> bytes:
    """Fill the store; returns a digest of the weights that does not depend on how the files are split.

    Raises ConfigError for tensors that are missing, left over or of the wrong shape, Unsupported for kinds of blocks
    that are not read, before any data is read. `progress` gets (done_bytes, total_bytes) from the calling thread.
    """
    found = _match(model, specs)
    turns = find_architecture(model)[1].rotates_neighbours
    loads = [
        _Load(place, _target(store, each, place), spec.head_dim if turns and each.role.startswith(_ROTATED) else 0)
        for each, place in found
    ]
    loads.sort(key=lambda load: (load.place.path, load.place.begin))  # a cold disk is read forwards
    total = sum(load.place.num_bytes for load in loads)
    done = 0
    progress(0, total)
    digests: dict[str, bytes] = {}
    with ThreadPoolExecutor(min(MOST_THREADS, usable_cores()), thread_name_prefix="weights") as pool:
        try:
            for load, digest in zip(loads, pool.map(_load, loads), strict=True):
                digests[load.place.name] = digest
                done += load.place.num_bytes
                progress(done, total)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    combined = xxhash.xxh3_128()
    for name in sorted(digests):
        combined.update(digests[name])
    return combined.digest()


def _target(store: ParameterStore, spec: ParameterSpec, place: TensorPlace) -> Tensor:
    """Where a tensor goes: as it is if it is stored in the file's kind, else as values."""
    blocks = store.blocks_of(spec, place.kind)
    return store.destination(spec) if blocks is None else blocks


def _load(load: _Load) -> bytes:
    """Read one tensor; returns its digest."""
    place = load.place
    digest = xxhash.xxh3_128(f"{place.name}/{place.kind.name}/{place.shape}/".encode())
    unit = load.head_dim or 1
    if load.target.dtype == torch.uint8:
        blocks = read_blocks(place, unit, digest.update)
        pieces: Iterator[tuple[int, NDArray[Any]]] = ((first, raw.reshape(count, -1)) for first, count, raw in blocks)
    else:
        pieces = read_pieces(place, unit, digest.update)
    for first, values in pieces:
        rows = _halves(values, load.head_dim) if load.head_dim else values
        load.target[first : first + len(rows)].copy_(torch.from_numpy(rows))
    return digest.digest()


def _halves(rows: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """Rows of whole heads, in which RoPE turns row 2i with row 2i + 1, so that it turns i with i + head_dim / 2."""
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def block_kinds(model: GgufModel, specs: Sequence[ParameterSpec]) -> dict[tuple[str, int], BlockKind]:
    """The kinds of blocks of all parameters that the file has, by role and layer."""
    names = {(spec.role, spec.layer): TENSOR_NAMES[spec.role].format(layer=spec.layer) for spec in specs}
    return {key: model.tensors[name].kind for key, name in names.items() if name in model.tensors}


def _match(model: GgufModel, specs: Sequence[ParameterSpec]) -> list[tuple[ParameterSpec, TensorPlace]]:
    path = model.metadata.path
    wanted = {TENSOR_NAMES[spec.role].format(layer=spec.layer): spec for spec in specs}
    missing = [name for name in wanted if name not in model.tensors]
    if missing:
        raise ConfigError(
            "MISSING_TENSOR",
            f"{path} lacks {len(missing)} tensors that its metadata implies: {_few(missing)}.",
            _FIX,
        )
    extra = [name for name in model.tensors if name not in wanted and name != ROPE_FACTORS]
    if extra:
        raise ConfigError(
            "UNEXPECTED_TENSOR",
            f"{path} holds {len(extra)} tensors that its metadata does not imply: {_few(extra)}.",
            _FIX,
        )
    for name, spec in wanted.items():
        place = model.tensors[name]
        if place.shape != spec.shape:
            raise ConfigError(
                "SHAPE_MISMATCH",
                f"Tensor {name} has shape {list(place.shape)}; the metadata of {path} implies {list(spec.shape)}.",
                _FIX,
            )
        check_readable(place)
    return [(spec, model.tensors[name]) for name, spec in wanted.items()]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
