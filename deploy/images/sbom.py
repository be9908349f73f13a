"""Prints the bill of materials (CycloneDX 1.5, JSON) of the Python that runs this program: its distributions, and
Debian's packages. The program only needs the standard library, because it runs while an image is built."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote

Component = dict[str, Any]


def bill(name: str) -> dict[str, Any]:
    """Everything in the image `name`."""
    own = {found.metadata["Name"]: found.version for found in distributions()}.get("quire", "0")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "container", "bom-ref": "image", "name": f"quire/{name}", "version": own}},
        "components": sorted([*python_components(), *debian_components()], key=lambda each: str(each["bom-ref"])),
    }


def python_components() -> Iterator[Component]:
    """The distributions of this environment."""
    for found in distributions():
        yield with_license(
            component(
                found.metadata["Name"],
                found.version,
                f"pkg:pypi/{quote(normalized(found.metadata['Name']))}@{quote(found.version)}",
            ),
            license_of(found),
        )


def normalized(name: str) -> str:
    """A distribution's name as package URLs spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def license_of(found: Distribution) -> Component | None:
    """The license: as an expression where the metadata has one, else by its name."""
    if "License-Expression" in found.metadata:
        return {"expression": found.metadata["License-Expression"]}
    classified = [line for line in found.metadata.get_all("Classifier") or () if line.startswith("License :: ")]
    text = found.metadata["License"].strip() if "License" in found.metadata else ""
    # Some put the whole license there.
    name = text if 0 < len(text) < 100 and "\n" not in text else (classified or [""])[0].rpartition(" :: ")[2]
    return {"license": {"name": name}} if name else None


def debian_components() -> Iterator[Component]:
    """The packages of the distribution's package manager; none where it is not Debian's."""
    if shutil.which("dpkg-query") is None:
        return
    command = ["dpkg-query", "--show", "--showformat", "${Package}\t${Version}\t${Architecture}\t${db:Status-Status}\n"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    distribution = os_release().get("ID", "debian")
    for line in listed.splitlines():
        package, version, architecture, status = line.split("\t")
        if status == "installed":
            found = f"pkg:deb/{distribution}/{quote(package)}@{quote(version, safe='')}?arch={architecture}"
            yield component(package, version, found)


def os_release(path: Path = Path("/etc/os-release")) -> dict[str, str]:
    """The distribution's own name for itself."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {key: value.strip('"') for key, _, value in (line.partition("=") for line in lines) if key}


def component(name: str, version: str, purl: str) -> Component:
    """An entry of the bill."""
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def with_license(entry: Component, license_choice: Component | None) -> Component:
    """The entry, with its license if that is known."""
    return entry if license_choice is None else {**entry, "licenses": [license_choice]}


if __name__ == "__main__":
    print(json.dumps(bill(sys.argv[1]), indent=1))
