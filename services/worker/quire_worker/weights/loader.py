"""Fills a ParameterStore, either from a checkpoint, whose bytes it hashes, or with seeded random numbers.

This module knows names and shapes; it does not know how the model computes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
import xxhash

from quire_common.errors import ConfigError
from quire_common.gguf.block_kinds import KIND_NAMED, BlockKind
from quire_worker.model.architectures.family import Family
from quire_worker.model.parameters import ParameterSpec
from quire_worker.weights.checkpoint import Checkpoint
from quire_worker.weights.parameter_store import ParameterStore, first_five
from quire_worker.weights.safetensors_file import DTYPES, SafetensorsFile, TensorEntry
from quire_worker.weights.source_tensors import SourceTensor, source_tensors
from quire_worker.weights.tensor_copier import TensorCopy, copy_tensors

Progress = Callable[[int, int], None]
"""(done_bytes, total_bytes), ever more. Calls come from the loading thread or, one at a time, from threads of
transformers."""

# Tensors of old checkpoints that hold what the spec already says.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
_DUMMY_DEVIATION = 0.02
DUMMY_DTYPE = torch.bfloat16
DUMMY_KIND = KIND_NAMED["BF16"]


def load_checkpoint(
    checkpoint: Checkpoint,
    specs: Sequence[ParameterSpec],
    family: Family,
    store: ParameterStore,
    progress: Progress,
) -> bytes:
    """Fill the store with the checkpoint's tensors, copied by several threads in the order of the files. Returns a
    digest of the weights that does not depend on how they are sharded.

    Before any data is copied, raises ConfigError for tensors that are missing, left over or of the wrong shape, or a
    head that differs from the tied embedding, and Unsupported for types of numbers that are not supported. `progress`
    gets (done bytes, total bytes).
    """
    found = _match(checkpoint, specs, family)
    total = sum(entry.num_bytes for _, _, entry in found)
    progress(0, total)
    # In the order of the files, so that a cold disk is read forwards.
    ordered = sorted(found, key=lambda item: (item[1].path, item[2].begin))
    copies = [TensorCopy(file.path, entry, *source.destinations(store)) for source, file, entry in ordered]
    digests = copy_tensors(copies, lambda done: progress(done, total))
    combined = xxhash.xxh3_128()
    for name in sorted(digests):
        combined.update(digests[name])
    return combined.digest()


def load_dummy(specs: Sequence[ParameterSpec], store: ParameterStore, seed: int, progress: Progress) -> bytes:
    """Fill the store with normally distributed numbers of standard deviation 0.02, rounded to bfloat16: around 1 for
    weights and biases of norms, around 0 for all others. Returns a digest of seed and shapes.

    A parameter's values depend only on the seed, its own role, layer and shape, and the kind of device.
    """
    total = sum(store.destination(spec).nbytes for spec in specs)
    done = 0
    progress(0, total)
    for spec in specs:
        target = store.destination(spec)
        # 32 bits, since torch's CPU generator reads no more of a seed.
        own_seed = zlib.crc32(f"{seed}/{spec.role}/{spec.layer}/{spec.shape}".encode())
        generator = torch.Generator(target.device).manual_seed(own_seed)
        drawn = torch.empty(spec.shape) if store.is_stored(spec) else target
        drawn.normal_(1.0 if "norm" in spec.role else 0.0, _DUMMY_DEVIATION, generator=generator)
        # As if read from a bf16 checkpoint.
        target.copy_(drawn.to(DUMMY_DTYPE))
        done += target.nbytes
        progress(done, total)
    shapes = "".join(f"{spec.role}/{spec.layer}/{spec.shape};" for spec in specs)
    return xxhash.xxh3_128(f"dummy/{seed}/{shapes}".encode()).digest()


def block_kinds(
    checkpoint: Checkpoint, specs: Sequence[ParameterSpec], family: Family
) -> dict[tuple[str, int], BlockKind]:
    """Return the types of all parameters that the checkpoint has in a supported type, by role and layer."""
    found, family = {}, family.in_checkpoint(checkpoint.names)
    for spec in specs:
        place = checkpoint.find(family.tensor_name(spec.role, spec.layer))
        if place is not None and place[1].dtype in DTYPES:
            found[spec.role, spec.layer] = KIND_NAMED[place[1].dtype]
    return found


def _match(
    checkpoint: Checkpoint, specs: Sequence[ParameterSpec], family: Family
) -> list[tuple[SourceTensor, SafetensorsFile, TensorEntry]]:
    """Return each tensor of the checkpoint that holds parameters, with its file and entry. Raises ConfigError for
    missing, unexpected and wrongly shaped tensors, and for a head that differs from the tied embedding; Unsupported for
    unsupported types of numbers. A tied head, and tensors that the loader or the family ignores by their suffix, are
    not unexpected."""
    family = family.in_checkpoint(checkpoint.names)
    wanted = source_tensors(specs, family)
    missing = [name for name in wanted if checkpoint.find(name) is None]
    if missing:
        raise ConfigError(
            "MISSING_TENSOR",
            f"{checkpoint.folder} lacks {len(missing)} tensors that its config.json implies: {first_five(missing)}.",
            "Use config.json and weights of the same revision.",
        )
    tied = not any(spec.role == "head.weight" for spec in specs)
    head = family.names["head.weight"]
    extra = [
        name
        for name in checkpoint.names
        if name not in wanted
        and not name.endswith((*_IGNORED_SUFFIXES, *family.ignored))
        and not (tied and name == head)
    ]
    if extra:
        raise ConfigError(
            "UNEXPECTED_TENSOR",
            f"{checkpoint.folder} holds {len(extra)} tensors that its config.json does not imply: {first_five(extra)}.",
            "Use config.json and weights of the same revision.",
        )
    if tied:
        _check_tied(checkpoint, head, family.names["embed.weight"])
    found = []
    for name, source in wanted.items():
        place = checkpoint.find(name)
        if place is None:
            continue  # reported above
        file, entry = place
        if entry.shape != source.shape:
            raise ConfigError(
                "SHAPE_MISMATCH",
                f"Tensor {name} has shape {list(entry.shape)}; config.json implies {list(source.shape)}.",
                "Use config.json and weights of the same revision.",
            )
        file.tensor(entry)  # raises for kinds of numbers that are not supported
        found.append((source, file, entry))
    return found


def _check_tied(checkpoint: Checkpoint, head: str, embedding: str) -> None:
    """Raise ConfigError if the checkpoint has a head that differs from the embedding in type or values, although
    config.json says that the embedding is the head. transformers would use this head."""
    places = [place for name in (head, embedding) if (place := checkpoint.find(name)) is not None]
    if len(places) < 2:
        return
    own, shared = (file.tensor(entry) for file, entry in places)
    if own.dtype != shared.dtype or not torch.equal(own, shared):
        raise ConfigError(
            "TIED_HEAD_DIFFERS",
            f"{checkpoint.folder} has {head}, which differs from {embedding}. Its config.json says that both are one "
            "matrix (`tie_word_embeddings`).",
            """Give --hf-overrides '{"tie_word_embeddings": false}' to use the head.""",
        )
