"""Checkpoint: the weight files of a model folder. It finds single or sharded safetensors files and opens them together.

It knows the layout of folders, and nothing of models.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from quire_common.errors import ConfigError
from quire_common.gguf import gguf_files
from quire_worker.model.config_file import read_json
from quire_worker.model.text_part import TextPart
from quire_worker.weights.safetensors_file import SafetensorsFile, TensorEntry

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack")


def raise_for_gguf_files(code: str, folder: Path, missing: str) -> None:
    """Raise ConfigError, with this code, if a folder that lacks the file `missing` has GGUF files; the error names one.
    Does nothing if it has none."""
    files = gguf_files(folder)
    if files:
        raise ConfigError(
            code,
            f"{folder} has no {missing}. This folder holds GGUF files.",
            f"Name one: `--model {files[0]}`.",
            param="model",
        )


class Checkpoint:
    """All tensors of a folder, by name; a context manager. Raises ConfigError, before any tensor is read, for files
    that are missing, unreadable, damaged or at odds with each other. The loaders compare shapes and types with the
    model's.

    `part`: only the tensors of this part of the model, under their names in it.
    """

    def __init__(self, folder: Path, part: TextPart | None = None) -> None:
        self.folder = folder
        self._files = ExitStack()
        self._where: dict[str, tuple[SafetensorsFile, TensorEntry]] = {}
        try:
            self._open_all()
            if part is not None:
                self._take(part)
        except BaseException:
            self._files.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap all files; a file with a view that is still in use stays mapped as long as the view."""
        self._where.clear()
        self._files.close()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors, in the order in which they lie in the files."""
        return tuple(self._where)

    def find(self, name: str) -> tuple[SafetensorsFile, TensorEntry] | None:
        """Return the file and entry of a tensor."""
        return self._where.get(name)

    def _open_all(self) -> None:
        """Open all weight files and note where each tensor lies, in the order of the files: those of the index, or the
        single file.

        Raises ConfigError for missing files, for a tensor in two files, and for a tensor that is not in the file that
        the index names.
        """
        index = self.folder / INDEX_NAME
        promised = self._read_index(index) if index.is_file() else {}
        paths = sorted(set(promised.values())) if promised else [self._single()]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
            raise ConfigError(
                "MISSING_SHARD",
                f"{self.folder} lacks {len(missing)} of its {len(paths)} weight files: {shown}.",
                "Download the missing files of the same revision.",
            )
        for path in paths:
            file = self._files.enter_context(SafetensorsFile(path))
            for entry in sorted(file.entries.values(), key=lambda found: found.begin):
                if entry.name in self._where:
                    raise ConfigError(
                        "CORRUPT_SAFETENSORS",
                        f"Tensor {entry.name} is in {self._where[entry.name][0].path.name} and in {path.name}.",
                        "Keep the files of one revision only.",
                    )
                self._where[entry.name] = (file, entry)
        for name, path in promised.items():
            if name not in self._where or self._where[name][0].path != path:
                raise ConfigError(
                    "MISSING_TENSOR",
                    f"{INDEX_NAME} places tensor {name} in {path.name}, which does not hold it.",
                    "Download all files of one revision.",
                )

    def _take(self, part: TextPart) -> None:
        """Leave out the tensors of other parts, and use the names that the others have in this part."""
        found = {name: part.tensor_name(name) for name in self._where}
        self._where = {own: self._where[name] for name, own in found.items() if own is not None}

    def _single(self) -> Path:
        """Return the path of model.safetensors, the weight file of a folder without an index. Raises ConfigError, with
        a fix, if it is missing: the folder may hold GGUF files, weights in another format, or no weights."""
        path = self.folder / SINGLE_NAME
        if path.is_file():
            return path
        raise_for_gguf_files("UNSUPPORTED_WEIGHT_FORMAT", self.folder, SINGLE_NAME)
        if any(next(self.folder.glob(pattern), None) for pattern in _OTHER_FORMATS):
            raise ConfigError(
                "UNSUPPORTED_WEIGHT_FORMAT",
                f"{self.folder} holds weights in a format other than safetensors.",
                "Convert them to safetensors: formats such as PyTorch's can execute code, and are not read.",
            )
        raise ConfigError(
            "MISSING_WEIGHTS",
            f"{self.folder} holds neither {SINGLE_NAME} nor {INDEX_NAME}.",
            "Download the weights, or use --load-format dummy for random ones.",
        )

    def _read_index(self, index: Path) -> dict[str, Path]:
        """Return the file of each tensor by the `weight_map` of the index. Raises ConfigError if the map is missing or
        empty, or a file's name has a folder in it."""
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError("BAD_INDEX", f"{index} has no weight_map.", "Download the file again.")
        for name, file in weight_map.items():
            # A name with a folder in it would read outside of the model.
            if not isinstance(file, str) or Path(file).name != file:
                raise ConfigError("BAD_INDEX", f"{index} places tensor {name} in {file!r}.", "Download the file again.")
        return {name: self.folder / file for name, file in weight_map.items()}
