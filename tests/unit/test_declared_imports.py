"""Each distribution declares the packages that its modules import, so that an installation of it alone can start."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.unit.source_files import ROOT, Import, imports_in, imports_of, sources

# A distribution's folder, and its package in that folder.
DISTRIBUTIONS = {"quire": (".", "quire")} | {
    f"quire-{name}": (f"services/{name}", f"services/{name}/quire_{name}")
    for name in ("common", "router", "tokenizer", "scheduler", "worker", "kvstore")
}

# Packages that modules import without a requirement of their distribution, each with the reason.
ELSEWHERE = {
    "quire": {
        "cryptography": "the extra `certs`, for `quire certs`",
        "huggingface_hub": "a download raises a typed error without it; the tokenizer and the worker require it",
        "tqdm": "huggingface_hub requires it",
        "uvloop": "`quire bench` uses asyncio without it",
    },
    "quire-common": {
        "blake3": "only the worker and the kvstore compute MACs of pages, and both require it",
        "cryptography": "only the worker and the kvstore seal data connections, and both require it",
    },
    "quire-scheduler": {
        "msgspec": "the extra `kv-events`",
        "zmq": "the extra `kv-events`",
    },
    "quire-worker": {
        "nixl": "the extra `nixl`",
        "transformers": "the extra `transformers`",
        "triton": "the extra `gpu`, and CUDA builds of torch",
    },
}


def declared(name: str) -> set[str]:
    """The requirements of a distribution, without extras, and of the distributions of ours that it requires."""
    project = tomllib.loads((ROOT / DISTRIBUTIONS[name][0] / "pyproject.toml").read_text())["project"]
    found: set[str] = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    return found.union(*(declared(each) for each in found & DISTRIBUTIONS.keys()))


def imported(imports: Iterable[Import]) -> set[str]:
    """The top-level packages that a module imports when it runs: imports for types alone are left out."""
    return {each.module.partition(".")[0] for each in imports if not each.for_types}


def undeclared(package: str, requirements: set[str], distributions: dict[str, list[str]]) -> dict[str, str]:
    """Imported package -> a module that imports it, where no requirement brings it."""
    found: dict[str, str] = {}
    for path in sources(package):
        for name in imported(imports_of(path)) - sys.stdlib_module_names:
            brings = {canonicalize_name(each) for each in distributions.get(name, [name])}
            if not name.startswith("quire") and not brings & requirements:
                found[name] = str(path.relative_to(ROOT))
    return found


@pytest.fixture(scope="module")
def distributions() -> dict[str, list[str]]:
    """Package -> the installed distributions that bring it."""
    return dict(packages_distributions())


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_all_imports_are_declared(name: str, distributions: dict[str, list[str]]) -> None:
    package = DISTRIBUTIONS[name][1]
    assert any(sources(package)), "the modules were found"
    found = undeclared(package, declared(name), distributions)
    assert found.keys() == ELSEWHERE.get(name, {}).keys(), found


def test_an_undeclared_import_is_found(distributions: dict[str, list[str]]) -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\ndef f():\n    import orjson\n"
    assert imported(imports_in(source)) == {"typing", "orjson"}
    requirements = declared("quire-tokenizer") - {"orjson"}
    found = undeclared(DISTRIBUTIONS["quire-tokenizer"][1], requirements, distributions)
    assert found == {"orjson": "services/tokenizer/quire_tokenizer/chat/render_pool.py"}
