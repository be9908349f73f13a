"""Finds the model that a user means: a folder, or the small one that comes with the source."""

from __future__ import annotations

import os
from pathlib import Path

from quire.errors import NotFound

DEMO = Path("models") / "demo"


def find_model(model: str | os.PathLike[str] | None) -> Path:
    """The model's folder, absolute; None is the demo model. Raises NotFound that says where was looked."""
    if model is not None:
        folder = Path(model).expanduser().absolute()
        if folder.is_dir():
            return folder
        raise NotFound(
            "MODEL_NOT_FOUND",
            f"There is no folder {folder}.",
            "Give the folder of a Hugging Face model (config.json, *.safetensors, tokenizer.json).",
            param="model",
        )
    candidates = [Path(__file__).resolve().parents[1] / DEMO, DEMO.absolute()]
    for candidate in candidates:
        if (candidate / "config.json").is_file():
            return candidate
    looked = " or ".join(str(candidate) for candidate in candidates)
    raise NotFound(
        "NO_DEMO_MODEL", f"There is no demo model in {looked}.", "Run in a checkout, or name a model's folder."
    )
