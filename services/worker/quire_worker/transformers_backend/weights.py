"""`load_weights` loads the weights of a model of the Transformers backend.

Quire's own reader of safetensors reads the tensors. transformers puts them into its modules; where its code needs other
tensors than the file has, it renames, splits or stacks them. transformers opens no file, so that nothing is unpickled.

The reader copies a tensor piece by piece to the model's device, in its final type. So host memory never holds the
weights of a model that a GPU runs, and holds the weights of a model that the CPU runs only once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor

from quire_common.errors import ConfigError, QuireError
from quire_worker.transformers_backend.attention import STEP_ATTENTION, register_attention
from quire_worker.transformers_backend.find_model import FoundModel
from quire_worker.transformers_backend.split_model import SplitModel
from quire_worker.weights.checkpoint import Checkpoint
from quire_worker.weights.safetensors_file import DTYPES
from quire_worker.weights.tensor_copier import STAGE_BYTES, TensorCopy, copy_tensors

if TYPE_CHECKING:
    from quire_worker.weights.loader import Progress
    from quire_worker.weights.safetensors_file import SafetensorsFile, TensorEntry

_FIX = "Use config.json and weights of the same revision."


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """A model with its weights."""

    model: SplitModel
    digest: bytes
    """A digest of the weights, which does not depend on how files divide them; of random weights, one of the seed and
    the release of transformers."""
    parameters: int
    num_bytes: int

    @classmethod
    def of(cls, model: Any, digest: bytes, device: torch.device) -> LoadedWeights:
        """Move a model that transformers made to a device, switch gradients off, and split it into layers and head.
        Count each parameter once; `num_bytes` includes buffers."""
        model.to(device).requires_grad_(False)
        parameters = list(model.parameters())  # each once, where several modules share it
        size = sum(each.nbytes for each in (*parameters, *model.buffers()))
        return cls(SplitModel(model), digest, sum(each.numel() for each in parameters), size)


def load_weights(
    found: FoundModel, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, progress: Progress
) -> LoadedWeights:
    """Make the model with the weights of a checkpoint. Floats become `dtype`, except those that transformers always
    keeps in float32 for this model. `progress` gets bytes done and bytes in all. Raises ConfigError for tensors that
    are missing, unexpected or of the wrong shape, and for any other failure of transformers, Unsupported for types of
    numbers that are not supported. Raises torch.OutOfMemoryError if a GPU's memory is too small; on the CPU, too little
    memory is such a failure."""
    register_attention()
    shortages = _memory_shortages(device)
    places = {name: place for name in checkpoint.names if (place := checkpoint.find(name)) is not None}
    reader = _TensorReader(device, sum(entry.num_bytes for _, entry in places.values()), progress)
    tensors = {name: _LazyTensor(reader, *place) for name, place in places.items()}
    try:
        model, info = found.model_class.from_pretrained(
            None,
            config=found.config,
            state_dict=tensors,
            dtype=dtype,
            attn_implementation=STEP_ATTENTION,
            ignore_mismatched_sizes=True,  # _check_loading_info names them
            output_loading_info=True,
        )
    except Exception as error:  # transformers reports what went wrong with a tensor by a RuntimeError
        if reader.error is not None:
            raise reader.error from error
        if _memory_shortages(device) > shortages:
            raise torch.OutOfMemoryError(str(error)) from error
        raise ConfigError(
            "BAD_WEIGHTS", f"transformers cannot load {checkpoint.folder}: {str(error)[:300]}", _FIX
        ) from error
    _check_loading_info(checkpoint, info)
    return LoadedWeights.of(model, reader.digest(), device)


def make_dummy(found: FoundModel, dtype: torch.dtype, device: torch.device, seed: int) -> LoadedWeights:
    """Make the model with random weights of this seed, as transformers initialises it. The random states of the CPU and
    of `device` stay unchanged; other GPUs that the process uses are seeded anew."""
    register_attention()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else ()), device:
        torch.manual_seed(seed)
        model = found.build(STEP_ATTENTION, dtype=dtype)
    return LoadedWeights.of(model, xxhash.xxh3_128(f"dummy/{seed}/{found.version}".encode()).digest(), device)


def _memory_shortages(device: torch.device) -> int:
    """Count how often a GPU had too little memory for this process. transformers hides such an error of a thread."""
    return int(torch.cuda.memory_stats(device)["num_ooms"]) if device.type == "cuda" else 0


class _TensorReader:
    """Reads and hashes tensors. transformers calls it from several threads."""

    def __init__(self, device: torch.device, total: int, progress: Progress) -> None:
        self._device = device
        self._total, self._done, self._progress = total, 0, progress
        self._digests: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self.error: QuireError | None = None
        """The first error. transformers raises an error of its own instead."""
        progress(0, total)

    def read(self, file: SafetensorsFile, entry: TensorEntry, dtype: torch.dtype | None) -> Tensor:
        """Read a tensor to the model's device, in this type; None: in the file's type. Note its digest and report
        progress. A QuireError is raised, and the first one is kept in `error`."""
        try:
            file.tensor(entry)  # raises for kinds of numbers that are not supported
            target = torch.empty(entry.shape, dtype=dtype or DTYPES[entry.dtype], device=self._device)
            stage = max(1, min(STAGE_BYTES, entry.num_bytes))
            found = copy_tensors([TensorCopy(file.path, entry, target)], lambda _: None, threads=1, stage_bytes=stage)
        except QuireError as error:
            self.error = self.error or error
            raise
        with self._lock:
            self._digests |= found
            self._done += entry.num_bytes
            self._progress(self._done, self._total)
        return target

    def digest(self) -> bytes:
        """Return a digest of 16 bytes of all tensors that were read, whatever their order."""
        combined = xxhash.xxh3_128()
        for name in sorted(self._digests):
            combined.update(self._digests[name])
        return combined.digest()


class _LazyTensor:
    """A tensor that is read when transformers evaluates `tensor[...].to(device, dtype)`. It stands for the slices of
    safetensors files, which transformers evaluates in the same way. transformers names the CPU; the tensor goes to the
    device of the reader."""

    def __init__(self, reader: _TensorReader, file: SafetensorsFile, entry: TensorEntry) -> None:
        self._read: Callable[[torch.dtype | None], Tensor] = lambda dtype: reader.read(file, entry, dtype)

    def __getitem__(self, _: object) -> _LazyTensor:
        return self

    def to(self, device: object = None, dtype: torch.dtype | None = None) -> Tensor:
        """Read the tensor."""
        return self._read(dtype)


def _check_loading_info(checkpoint: Checkpoint, info: dict[str, Collection[Any]]) -> None:
    """Raise ConfigError if the checkpoint lacks tensors, has tensors that the model does not have, or tensors of other
    shapes. `info`: the loading info of transformers."""
    for code, kind, what in (
        ("MISSING_TENSOR", "missing_keys", "lacks {} tensors that its config.json implies"),
        ("UNEXPECTED_TENSOR", "unexpected_keys", "holds {} tensors that its config.json does not imply"),
        ("SHAPE_MISMATCH", "mismatched_keys", "holds {} tensors of other shapes than its config.json implies"),
    ):
        names = sorted(str(each[0] if isinstance(each, tuple) else each) for each in info[kind])
        if names:
            shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise ConfigError(code, f"{checkpoint.folder} {what.format(len(names))}: {shown}.", _FIX)
