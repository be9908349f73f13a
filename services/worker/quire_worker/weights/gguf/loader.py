"""Fills a ParameterStore from a GGUF file, and hashes the bytes that it reads.

This module knows names, shapes and the order of rotated rows. `tensor_values` reads the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from quire_common.errors import ConfigError
from quire_common.gguf import GgufModel, TensorPlace
from quire_common.gguf.block_kinds import BlockKind
from quire_worker.model.parameters import ParameterSpec
from quire_worker.threads.cores import usable_cores
from quire_worker.weights.gguf.architectures import find_architecture
from quire_worker.weights.gguf.rope_fields import ROPE_TENSORS
from quire_worker.weights.gguf.tensor_values import check_readable, read_blocks, read_pieces
from quire_worker.weights.parameter_store import ParameterStore, first_five

MOST_THREADS = 8
_FIX = "Download the file again, or convert the model with a current llama.cpp."


@dataclass(frozen=True, slots=True)
class _Load:
    """One parameter's rows of a tensor, and the place for its values."""

    place: TensorPlace
    target: Tensor
    """For its values; uint8: for its blocks, [rows, bytes of a row]."""
    row_order: tuple[int, ...]
    """As in ParameterSpec."""


def load_gguf(
    model: GgufModel,
    specs: Sequence[ParameterSpec],
    store: ParameterStore,
    progress: Callable[[int, int], None],
) -> bytes:
    """Fill the store, on up to eight threads. Returns a digest of the weights that does not depend on how the files are
    split.

    Before any data is read, raises ConfigError for tensors that are missing, left over or of the wrong shape, and
    Unsupported for kinds of blocks that are not supported. `progress` gets (done_bytes, total_bytes) from the calling
    thread.
    """
    found = _match(model, specs)
    loads = [_Load(place, _target(store, each, place), each.row_order) for each, place in found]
    loads.sort(key=lambda load: (load.place.path, load.place.begin))  # a cold disk is read forwards
    total = sum(load.place.num_bytes for load in loads)
    done = 0
    progress(0, total)
    digests: dict[tuple[str, int], bytes] = {}
    with ThreadPoolExecutor(min(MOST_THREADS, usable_cores()), thread_name_prefix="weights") as pool:
        try:
            for load, digest in zip(loads, pool.map(_load, loads), strict=True):
                digests[load.place.name, load.place.begin] = digest
                done += load.place.num_bytes
                progress(done, total)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    combined = xxhash.xxh3_128()
    for key in sorted(digests):
        combined.update(digests[key])
    return combined.digest()


def _target(store: ParameterStore, spec: ParameterSpec, place: TensorPlace) -> Tensor:
    """Return the memory for a tensor: for its blocks, if it is stored in the file's kind, else for its values."""
    blocks = store.blocks_of(spec, place.kind)
    return store.destination(spec) if blocks is None else blocks


def _load(load: _Load) -> bytes:
    """Read one parameter piece by piece into its target, as raw blocks or as float values, with rows of heads
    reordered. Returns the digest of its name, kind, shape and bytes."""
    place = load.place
    digest = xxhash.xxh3_128(f"{place.name}/{place.kind.name}/{place.shape}/".encode())
    unit = len(load.row_order) or 1
    if load.target.dtype == torch.uint8:
        blocks = read_blocks(place, unit, digest.update)
        pieces: Iterator[tuple[int, NDArray[Any]]] = ((first, raw.reshape(count, -1)) for first, count, raw in blocks)
    else:
        pieces = read_pieces(place, unit, digest.update)
    for first, values in pieces:
        rows = _reordered(values, load.row_order) if load.row_order else values
        load.target[first : first + len(rows)].copy_(torch.from_numpy(rows))
    return digest.digest()


def _reordered(rows: NDArray[Any], order: tuple[int, ...]) -> NDArray[Any]:
    """Return the rows of whole heads, with each head's rows in another order."""
    heads = rows.reshape(-1, len(order), *rows.shape[1:])
    return np.ascontiguousarray(heads[:, list(order)]).reshape(rows.shape)


def block_kinds(model: GgufModel, specs: Sequence[ParameterSpec]) -> dict[tuple[str, int], BlockKind]:
    """The kinds of blocks of all parameters that the file has, by role and layer."""
    places = ((spec, model.tensors.get(name)) for name, group in _by_name(model, specs).items() for spec in group)
    return {(spec.role, spec.layer): place.kind for spec, place in places if place is not None}


def _by_name(model: GgufModel, specs: Sequence[ParameterSpec]) -> dict[str, list[ParameterSpec]]:
    """Return parameters by the name of their tensor, which may hold several, one after the other. The file need not
    have the tensor."""
    files = find_architecture(model)[1]
    found: dict[str, list[ParameterSpec]] = {}
    for spec in specs:
        found.setdefault(files.tensor_name(spec.role, spec.layer, model.tensors.keys()), []).append(spec)
    return found


def _match(model: GgufModel, specs: Sequence[ParameterSpec]) -> list[tuple[ParameterSpec, TensorPlace]]:
    """Return each parameter and its rows in the file. Raises ConfigError for tensors that are missing, unexpected or of
    the wrong shape, and Unsupported for kinds of blocks that are not supported."""
    path, wanted = model.metadata.path, _by_name(model, specs)
    missing = [name for name in wanted if name not in model.tensors]
    if missing:
        raise ConfigError(
            "MISSING_TENSOR",
            f"{path} lacks {len(missing)} tensors that its metadata implies: {first_five(missing)}.",
            _FIX,
        )
    extra = [name for name in model.tensors if name not in wanted and name not in ROPE_TENSORS]
    if extra:
        raise ConfigError(
            "UNEXPECTED_TENSOR",
            f"{path} holds {len(extra)} tensors that its metadata does not imply: {first_five(extra)}.",
            _FIX,
        )
    found: list[tuple[ParameterSpec, TensorPlace]] = []
    for name, group in wanted.items():
        place, shape = model.tensors[name], _shape(group)
        if place.shape != shape:
            raise ConfigError(
                "SHAPE_MISMATCH",
                f"Tensor {name} has shape {list(place.shape)}; the metadata of {path} implies {list(shape)}.",
                _FIX,
            )
        check_readable(place)
        found += zip(group, _parts(place, group), strict=True)
    return found


def _shape(group: Sequence[ParameterSpec]) -> tuple[int, ...]:
    """Return the shape of a tensor with these parameters: their own shapes stacked along the first axis. A single
    parameter with a `file_shape` has that shape."""
    first = group[0]
    if len(group) == 1 and first.file_shape:
        return first.file_shape
    return (sum(spec.shape[0] for spec in group), *first.shape[1:])


def _parts(place: TensorPlace, group: Sequence[ParameterSpec]) -> Iterator[TensorPlace]:
    """Return the rows of each parameter as a separate place. Blocks lie within rows."""
    begin, row_bytes = place.begin, place.num_bytes // _shape(group)[0]
    for spec in group:
        size = place.num_bytes if len(group) == 1 else row_bytes * spec.shape[0]
        yield replace(place, shape=spec.shape, begin=begin, num_bytes=size)
        begin += size
