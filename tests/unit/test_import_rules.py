"""No module of Quire imports itself by way of others, not even for types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.unit.source_files import ROOT, Import, imports_in, imports_of, sources

PACKAGES = ("quire", *(f"services/{name}/quire_{name}" for name in ("common", "router", "tokenizer", "scheduler")))
PACKAGES += ("services/worker/quire_worker", "services/kvstore/quire_kvstore", "bench")


def modules() -> dict[str, Path]:
    """Modules by dotted name; generated stubs import nothing of ours."""
    found = {}
    for package in PACKAGES:
        parent = (ROOT / package).parent
        for path in sources(package):
            parts = path.relative_to(parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(imports: Iterable[Import], known: Mapping[str, object]) -> set[str]:
    """The modules of ours among what a file imports: a name that is imported from a package may be a module."""
    inside = ((f"{each.module}.{each.name}" if each.name else each.module, each.module) for each in imports)
    return {name if name in known else module for name, module in inside} & known.keys()


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Sets of modules each of which leads to all others of its set.

    What imports nothing that is left is taken away, and what nothing imports, until only circles and the ways between
    them are left; then each module's set is what it reaches and what reaches it.
    """
    left = {name: {other for other in others if other != name} for name, others in graph.items()}
    while True:
        used = set().union(*left.values()) if left else set()
        ends = {name for name, others in left.items() if not others or name not in used}
        if not ends:
            break
        left = {name: others - ends for name, others in left.items() if name not in ends}
    reached = {name: _reached(name, left) for name in left}
    found = {
        tuple(sorted(other for other in left if other in reached[name] and name in reached[other])) for name in left
    }
    return [list(each) for each in sorted(found) if each]


def _reached(start: str, graph: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    ahead = [start]
    while ahead:
        new = graph[ahead.pop()] - found
        found |= new
        ahead.extend(new)
    return found


def test_no_import_circles_types_included() -> None:
    known = modules()
    graph = {name: imported(imports_of(path), known) for name, path in known.items()}
    assert len(graph) > 500, "the modules were found"
    assert circles(graph) == []


# The router's folders, and the other folders that each may import: arrows run one way, from the front to the pages.
ROUTER_FOLDERS = {
    "pages": (),
    "limits": (),
    "placement": ("pages",),
    "sequences": ("placement",),
    "text": ("sequences",),
    "kv_transfer": ("placement", "sequences"),
    "replicas": ("placement", "sequences", "text", "kv_transfer"),
    "requests": ("limits", "sequences", "text", "kv_transfer", "replicas"),
    "front.parameters": ("sequences", "requests"),
    "front.http": ("front", "front.parameters", "limits", "placement", "replicas", "requests", "sequences", "text"),
    "front.grpc": ("front", "front.parameters", "limits", "placement", "replicas", "requests", "sequences", "text"),
    "front": (),
}


def router_folder(module: str) -> str:
    """The longest folder of the table that a module is in; '' for the modules beside the folders."""
    name = module.removeprefix("quire_router.")
    return max((folder for folder in ROUTER_FOLDERS if name.startswith(f"{folder}.")), key=len, default="")


def test_arrows_between_the_routers_folders_run_one_way() -> None:
    known = modules()
    assert [router_folder(f"quire_router.{name}") for name in ("front.http.edge", "front.request_ids", "metrics")] == [
        "front.http",
        "front",
        "",
    ]
    assert not circles({folder: set(others) for folder, others in ROUTER_FOLDERS.items()})
    wrong = [
        f"{name} imports {other}"
        for name, path in known.items()
        if (folder := router_folder(name))
        for other in sorted(imported(imports_of(path), known))
        if router_folder(other) not in ("", folder, *ROUTER_FOLDERS[folder])
    ]
    assert not wrong, wrong


def test_a_circle_would_be_found() -> None:
    sources = {
        "a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from b import B",
        "b": "def late():\n    import c",
        "c": "from a import A",
        "d": "from a import A\nimport e",
        "e": "x = 1",
    }
    graph = {name: imported(imports_in(source), sources) for name, source in sources.items()}
    assert circles(graph) == [["a", "b", "c"]]
