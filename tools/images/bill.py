"""Checks an image's bill of materials: a valid CycloneDX document that lists what the recipe installed."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec

from tools.images.podman import podman


def bill_problem(image: str, target: str) -> str:
    """Return the faults of an image's bill of materials; empty if there are none. The schema is checked if the package
    cyclonedx-python-lib is installed."""
    text = podman("run", "--rm", "--network", "none", "--entrypoint", "cat", image, "/opt/quire/sbom.cdx.json").stdout
    found = {re.sub(r"@.*", "", each["purl"]): each["version"] for each in json.loads(text)["components"]}
    service = {"worker-cpu": "worker", "worker-gpu": "worker", "all-in-one": "router"}.get(target, target)
    wanted = {"pkg:pypi/quire", "pkg:pypi/quire-common", f"pkg:pypi/quire-{service}", "pkg:pypi/grpcio"}
    if missing := wanted - {*found}:
        return f"the bill of materials lacks {', '.join(sorted(missing))}"
    if ("pkg:pypi/torch" in found) != (target in ("worker-cpu", "worker-gpu", "all-in-one")):
        return "torch is in an image that needs none, or is missing"
    if any(name.startswith("pkg:pypi/nvidia") for name in found) != (target == "worker-gpu"):
        return "CUDA is in an image that needs none, or is missing"
    return schema_problem(text)


def schema_problem(text: str) -> str:
    """Return violations of the schema of CycloneDX 1.5 in a document; empty if there are none."""
    if find_spec("cyclonedx") is None:
        return ""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    problem = JsonStrictValidator(SchemaVersion.V1_5).validate_str(text)
    return "" if problem is None else f"the bill of materials is no CycloneDX: {str(problem)[:300]}"
