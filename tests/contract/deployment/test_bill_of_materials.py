"""The bill of materials of an image lists the distributions and the packages of Debian that are there."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.unit.deployment.test_images import FOLDER, pins_of_constraints


@pytest.fixture(scope="module")
def sbom() -> ModuleType:
    spec = importlib.util.spec_from_file_location("image_sbom", FOLDER / "sbom.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_bill_of_materials_lists_every_distribution_with_its_license(sbom: ModuleType) -> None:
    bill = json.loads(json.dumps(sbom.bill("router")))
    assert (bill["bomFormat"], bill["specVersion"], bill["metadata"]["component"]["name"]) == (
        *("CycloneDX", "1.5"),
        "quire/router",
    )
    found = {each["purl"]: each for each in bill["components"]}
    grpcio = found[f"pkg:pypi/grpcio@{pins_of_constraints()['grpcio']}"]
    assert grpcio["version"] == pins_of_constraints()["grpcio"] and "Apache" in json.dumps(grpcio["licenses"])
    assert f"pkg:pypi/huggingface-hub@{pins_of_constraints()['huggingface-hub']}" in found
    assert all(each["bom-ref"] == each["purl"] for each in bill["components"])


def test_the_bill_of_materials_reads_what_debian_calls_itself(sbom: ModuleType, tmp_path: Path) -> None:
    release = tmp_path / "os-release"
    release.write_text('NAME="Debian GNU/Linux"\nID=debian\n')
    assert sbom.os_release(release)["ID"] == "debian"
    assert sbom.os_release(tmp_path / "none") == {}
