"""The house rules of docs/architecture.md, checked over the source tree."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.unit.banned_nouns import BANNED, banned_in, banned_names
from tests.unit.foreign_assignments import foreign_assignments
from tests.unit.source_files import ROOT, imports_of, may_name, ours, sources, text_of

SERVICES = ("router", "tokenizer", "scheduler", "worker", "kvstore")
SKELETON = ("__main__.py", "config.py", "server.py", "servicer.py")
MAX_LINES = 500


def imports(path: Path) -> set[str]:
    """Modules that a file imports, wherever in it."""
    return {each.module for each in imports_of(path)}


def top(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_imports_no_other_service(service: str) -> None:
    others = {f"quire_{s}" for s in SERVICES if s != service}
    for path in sources(f"services/{service}"):
        names = imports(path)
        assert not top(names) & others, f"{path} imports another service"
        public = {n for n in names if n.split(".")[0] == "quire" and not n.startswith("quire.v1")}
        assert not public, f"{path} imports {public}: of the public package a service may use quire.v1 alone"


def test_common_imports_no_service() -> None:
    for path in sources("services/common"):
        assert not top(imports(path)) & {f"quire_{s}" for s in SERVICES}, path


def test_benchmarks_import_no_tests() -> None:
    for path in sources("bench"):
        assert "tests" not in top(imports(path)), path


def test_the_public_package_is_light() -> None:
    for path in sources("quire"):
        heavy = top(imports(path)) & {"quire_common", "torch", "numpy", *(f"quire_{s}" for s in SERVICES)}
        assert not heavy, f"{path} imports {heavy}"


def test_only_the_worker_imports_torch() -> None:
    for path in sources("quire", *(f"services/{s}" for s in (*SERVICES, "common") if s != "worker")):
        assert not top(imports(path)) & {"torch", "triton", "transformers"}, path


@pytest.mark.parametrize("service", ("common", "router", "tokenizer", "scheduler", "kvstore"))
def test_torch_free_distributions_declare_no_torch(service: str) -> None:
    project = tomllib.loads((ROOT / "services" / service / "pyproject.toml").read_text())["project"]
    assert not any(re.match(r"(torch|triton|transformers)\b", d) for d in project["dependencies"])


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_has_the_skeleton(service: str) -> None:
    folder = ROOT / "services" / service
    for name in SKELETON:
        assert (folder / f"quire_{service}" / name).is_file(), f"{service} lacks {name}"
    for name in ("pyproject.toml", "README.md"):
        assert (folder / name).is_file(), f"{service} lacks {name}"


def test_nothing_loads_code_from_data() -> None:
    """Pickles, torch.load and remote model code execute what they read. Names are spelled apart so as not to match."""
    banned_modules = {"pickle", "cPickle", "_pickle", "marshal", "cloudpickle", "dill", "shelve", "joblib"}
    banned_calls = re.compile(
        r"\btorch\.(load|save)\(|trust_" + r"remote_code\s*=\s*True|allow_" + r"pickle\s*=\s*True"
    )
    for path in ours():
        if may_name(text_of(path), *banned_modules):
            assert not top(imports(path)) & banned_modules, path
        if path != Path(__file__).resolve():
            assert not banned_calls.search(text_of(path)), path


def test_no_assert_statement_in_the_product() -> None:
    """`python -O` leaves them out: `require` checks our own state, and a typed error refuses what others send."""
    for path in sources("quire", "services"):
        if not may_name(text_of(path), "assert"):
            continue
        lines = [node.lineno for node in ast.walk(ast.parse(text_of(path))) if isinstance(node, ast.Assert)]
        assert not lines, f"{path}, lines {lines}: call quire_common.errors.require, or raise a typed error"


def test_protobuf_stops_at_the_boundary() -> None:
    """Outside servicers, links and codecs, services handle dataclasses and arrays."""
    boundary = re.compile(
        r"(servicer|server|link|client|codec|session|wire|backend|stream|watch|__main__)", re.IGNORECASE
    )
    for service in SERVICES:
        for path in sources(f"services/{service}"):
            if any(n.startswith("quire.v1") for n in imports(path)):
                assert boundary.search(path.stem), f"{path} imports protobuf but is no boundary by its name"


def kernels_with_names_of_triton(source: str) -> list[str]:
    """Names of kernels with a parameter that Triton's generated launch code uses for itself, and so overwrites."""
    return [
        function.name
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef)
        and any(argument.arg in ("params", "specialization", "options") for argument in function.args.args)
        and any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)
    ]


def test_no_kernel_has_a_parameter_that_triton_overwrites() -> None:
    """The interpreter, which most tests use, does not notice it."""
    folder = ROOT / "services" / "worker" / "quire_worker" / "ops" / "triton" / "kernels"
    sources = [text_of(path) for path in sorted(folder.glob("*.py"))]
    assert sources
    assert not [name for source in sources for name in kernels_with_names_of_triton(source)]
    assert kernels_with_names_of_triton("@triton.jit(x=1)\ndef kernel(rows, params): pass") == ["kernel"]


def test_files_stay_small() -> None:
    long = {str(p.relative_to(ROOT)): n for p in ours() if (n := len(text_of(p).splitlines())) > MAX_LINES}
    assert not long, f"split by concern: {long}"


def test_every_ignore_says_why() -> None:
    silent = []
    for path in ours():
        for number, line in enumerate(text_of(path).splitlines(), 1):
            if "#" not in line:
                continue
            if re.search(r"#\s*(noqa|type:\s*ignore)", line) and not re.search(
                r"#\s*(noqa(:\s*[A-Z0-9, ]+)?|type:\s*ignore(\[[a-z0-9, -]+\])?)\s+(#|-|—)\s*\S.{4}", line
            ):
                silent.append(f"{path.relative_to(ROOT)}:{number}")
    assert not silent, silent


# Packages whose identifiers have the field's words; the tests follow.
IN_THE_FIELDS_WORDS = ("quire", "services", "bench", "tools")


@pytest.mark.parametrize("package", IN_THE_FIELDS_WORDS)
def test_identifiers_have_the_fields_words(package: str) -> None:
    found = [f"{path.relative_to(ROOT)}:{name}" for path in sources(package) for name in banned_names(text_of(path))]
    assert not found, found


def test_banned_nouns_are_noticed_in_every_kind_of_identifier() -> None:
    source = """
from quire_worker.ring import TheDesk
class CargoList(Base):
    def harvest(self, wish: int, *, a_shelf: int = 0) -> None:
        self.outbox = place(turnstile=wish)
"""
    found = [name.split(" (")[0].split(": ")[1] for name in banned_names(source)]
    assert sorted(found) == ["CargoList", "TheDesk", "a_shelf", "harvest", "outbox", "turnstile", "wish", "wish"]


@pytest.mark.parametrize("name", ["InFlightStep", "LEAST_IN_FLIGHT", "medium", "mover_ring_bytes", "desktop", "again"])
def test_wire_names_and_other_words_are_exempt_from_the_ban(name: str) -> None:
    assert not banned_in(name)


def test_the_list_of_banned_nouns_is_short_and_says_what_to_use() -> None:
    assert len(BANNED) <= 30 and all(BANNED.values())


# Attributes of libraries (Triton, tokenizers, threading.local), and callbacks and counters that a device's parts share.
ASSIGNED_FROM_OUTSIDE = {
    ("services/kvstore/quire_kvstore/tiers/redis_backend.py", "self._local.generation"),
    ("services/tokenizer/quire_tokenizer/guarded_tokenizer.py", "self._tokenizer.normalizer"),
    ("services/worker/quire_worker/cuda/cuda_device.py", "body.advanced"),
    ("services/worker/quire_worker/cuda/graphs/step_graph.py", "self._body.advanced"),
    ("services/worker/quire_worker/cuda/kernel_compiler.py", "JITFunction.run"),
    ("services/worker/quire_worker/cuda/kernel_compiler.py", "few.decoder"),
    ("services/worker/quire_worker/engine/slots.py", "controls.ended"),
    ("services/worker/quire_worker/profile/step_profile.py", "decoder.ops"),
    ("services/worker/quire_worker/profile/step_profile.py", "device.wake"),
    ("services/worker/quire_worker/replica.py", "self._device.wake"),
    ("services/worker/quire_worker/replica.py", "self._matcher.wake"),
    ("services/worker/quire_worker/replica.py", "self._transfer_agent.wake"),
    ("services/worker/quire_worker/ops/cpu/object_code.py", "value.name"),  # llvmlite: how a symbol is renamed
}


def test_state_has_one_writer() -> None:
    product = {str(path.relative_to(ROOT)): text_of(path) for path in sources("quire", "services")}
    found = {tuple(each) for each in foreign_assignments(product)}
    assert len(product) > 500 and len(ASSIGNED_FROM_OUTSIDE) <= 40
    assert found <= ASSIGNED_FROM_OUTSIDE, "give the class a method that says what happens"
    assert found == ASSIGNED_FROM_OUTSIDE, "an exception that is not needed any more"


def test_an_assignment_from_outside_is_noticed() -> None:
    record = "class Record:\n    count: int = 0\n    __slots__ = ('late',)\n    def __init__(self): self.made = 1\n"
    others = """
from quire.v1 import common_pb2 as pb
def change(record, message: pb.Usage, part: "Part"):
    record.count += 1
    record.inner.late = 2
    del record.made
    record.unknown = 3
    message.count = 4
    made = pb.Usage()
    made.count = 5
    return built().count
def built() -> pb.Usage: ...
def again():
    other = built()
    other.count = 6
class Part:
    def __init__(self): self.own = 1
def own(part: Part): part.own = 2
"""
    found = [target for _, target in foreign_assignments({"record.py": record, "others.py": others})]
    assert found == ["record.count", "record.inner.late", "record.made"]


MOST_MODULES = 20


def test_folders_stay_small() -> None:
    """Everywhere; a package's __init__ does not count."""
    modules = Counter(path.parent for path in ours() if path.name != "__init__.py")
    crowded = {str(folder.relative_to(ROOT)): n for folder, n in modules.items() if n > MOST_MODULES}
    assert len(modules) > 50
    assert not crowded, f"split by subject: {crowded}"
