"""Manifests that the API server would refuse, by the schemas of Kubernetes and of the custom resources."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.kube.chart import ROOT, TOOLS, Manifest, need_tools, title

# The oldest that the chart takes, the one of Helm's client, and the newest of the package.
VERSIONS = ("1.30", "1.35", "1.37")
MODELS = ("cert-manager.io", "gateway.networking.k8s.io", "keda.sh", "monitoring.coreos.com")
# CRDs, as YAML, of groups that no package has.
CRDS = Path(os.environ.get("QUIRE_CRDS") or ROOT.parent / "shared" / "crds")
CRD_FILES = {
    "leaderworkerset.x-k8s.io": "leaderworkerset.x-k8s.io_leaderworkersets.yaml",
    "disaggregatedset.x-k8s.io": "disaggregatedset.x-k8s.io_disaggregatedsets.yaml",
}
LIMIT_S = 600


def group_of(manifest: Manifest) -> str:
    """Return the API group; empty for the core."""
    group, slash, _ = str(manifest.get("apiVersion", "")).partition("/")
    return group if slash else ""


def problems_of(manifests: Sequence[Manifest]) -> list[list[str]]:
    """Return for each manifest what the schemas find."""
    found: list[list[str]] = [[] for _ in manifests]
    ours = [index for index, each in enumerate(manifests) if group_of(each) in MODELS]
    if ours:
        answers = _by_models([manifests[index] for index in ours])
        for index, problems in zip(ours, answers, strict=True):
            found[index] += problems
    for index, manifest in enumerate(manifests):
        group = group_of(manifest)
        if group in CRD_FILES:
            found[index] += _by_crd(manifest, group)
        elif group not in MODELS:
            found[index] += [problem for version in VERSIONS for problem in _by_core(manifest, version)]
    return [
        [f"{title(manifest)}: {problem}" for problem in problems]
        for manifest, problems in zip(manifests, found, strict=True)
    ]


@functools.cache
def _validator() -> Any:
    """The module kubernetes_validate, which has no types."""
    need_tools()
    folder = str(TOOLS / "python")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module("kubernetes_validate")


def _by_core(manifest: Manifest, version: str) -> list[str]:
    validate = _validator()
    try:
        validate.validate(manifest, version, strict=True)
    except validate.ValidationError as error:
        return [f"{version}: {'.'.join(map(str, error.path))}: {error.message[:300]}"]
    except (validate.SchemaNotFoundError, KeyError) as error:
        return [f"{version}: there is no such kind: {error}"]
    return []


def _by_models(manifests: Sequence[Manifest]) -> list[list[str]]:
    need_tools()
    script = Path(__file__).with_name("custom_resources.mjs")
    known = [each if _has_model(each) else {**each, "apiVersion": "", "kind": ""} for each in manifests]
    result = subprocess.run(
        ["node", script, TOOLS],
        input=json.dumps([each for each in known if each["kind"]]),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    answers = iter(json.loads(result.stdout))
    return [next(answers) if each["kind"] else ["there is no such kind"] for each in known]


def _has_model(manifest: Manifest) -> bool:
    path = f"{manifest['apiVersion']}/{manifest.get('kind')}.js"
    return any(TOOLS.glob(f"node_modules/@kubernetes-models/*/{path}"))


@functools.cache
def _crd(group: str) -> Any:
    file = CRDS / CRD_FILES[group]
    if not file.exists():
        pytest.skip(f"there is no {file}: QUIRE_CRDS names the folder of the CRDs")
    version = yaml.load(file.read_text(), yaml.CSafeLoader)["spec"]["versions"][0]
    schema = _strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
    return version["name"], jsonschema.Draft202012Validator(schema)


def _strict(schema: Any) -> Any:
    """Return the schema as the API server applies it strictly: fields that it does not name are refused."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _strict(value) for key, value in schema.items() if key not in ("description", "default", "properties")}
    if "properties" in schema:
        made["properties"] = {name: _strict(value) for name, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
    return made


def _by_crd(manifest: Manifest, group: str) -> list[str]:
    version, validator = _crd(group)
    if manifest["apiVersion"] != f"{group}/{version}":
        return [f"there is no {manifest['apiVersion']}"]
    errors = validator.iter_errors(copy.deepcopy(manifest))
    return [f"{'.'.join(map(str, error.path))}: {error.message[:300]}" for error in errors]
