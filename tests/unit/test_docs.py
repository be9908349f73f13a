"""What the documents tell a reader to type is there: links, make targets, flags, ports, subcommands, request bodies."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

from quire.cli import registry
from quire_common.config import load_config
from quire_router.front.http.parsing.parse import parse_chat, parse_completion
from quire_router.front.parameters.request_limits import Limits

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("router", "tokenizer", "scheduler", "worker", "kvstore")
DOCUMENTS = sorted(
    path
    for pattern in (
        "*.md",
        "bench/*.md",
        "docs/**/*.md",
        "deploy/**/*.md",
        "services/*/README.md",
        "models/*/README.md",
    )
    for path in ROOT.glob(pattern)
)
CONFIGS = {s: getattr(importlib.import_module(f"quire_{s}.config"), f"{s.capitalize()}Config") for s in SERVICES}


def commands(path: Path) -> list[str]:
    """Lines of code blocks, fenced or indented, with continuations joined; so are the lines of a body in quotes."""
    text, fenced = path.read_text().replace("\\\n", " "), False
    found: list[str] = []
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif found and found[-1].startswith("curl ") and found[-1].count("'") % 2:
            found[-1] += line
        elif fenced or line.startswith("    "):
            found.append(line.strip().removeprefix(".venv/bin/"))
    return found


def all_commands() -> list[tuple[Path, str]]:
    return [(path, line) for path in DOCUMENTS for line in commands(path)]


def flags_of(line: str) -> list[str]:
    return shlex.split(re.sub(r"\[(.*?)\]", r"\1", line), comments=True)[3:]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("folder", ["cuda", "ops/triton", "ops/triton/kernels", "profile"])
def test_the_workers_readme_has_a_word_for_each_file(folder: str) -> None:
    told = (ROOT / "services" / "worker" / "README.md").read_text()
    files = sorted((ROOT / "services" / "worker" / "quire_worker" / folder).glob("[a-z]*.py"))
    untold = [path.name for path in files if f"{path.name}`" not in told]
    assert files and not untold, (
        f"say in services/worker/README.md what {folder}/{', '.join(untold)} is responsible for"
    )


def test_the_readme_of_bench_has_a_row_for_each_file() -> None:
    text = (ROOT / "bench" / "README.md").read_text()
    sections = re.findall(r"^## (bench/[\w/]+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    named = {
        f"{folder}/{file}"
        for folder, section in sections
        for cell in re.findall(r"^\| (.+?) \|", section, re.MULTILINE)
        for file in re.findall(r"`(\w+\.py)`", cell)
    }
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "bench").rglob("*.py") if path.name != "__init__.py"}
    assert named == files


def test_the_glossary_is_short() -> None:
    entries = re.findall(r"^\| (.+?) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)[1:]
    assert 20 < len(entries) <= 40
    assert entries == sorted(entries, key=str.lower), "in the order of the alphabet"


def test_make_targets_are_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {match for path in DOCUMENTS for match in re.findall(r"`make ([a-z-]+)`", path.read_text())}
    named |= {line.split()[1] for _, line in all_commands() if line.startswith("make ")}
    assert len(named) > 5 and named <= targets


def test_services_start_as_their_documents_say_and_find_each_other() -> None:
    listening: dict[str, str] = {}
    peers: dict[tuple[str, str], str] = {}
    for _, line in all_commands():
        match = re.match(r"python -m quire_([a-z]+) ", line)
        if match is None or "--help" in line:
            continue
        service = match[1]
        config = load_config(CONFIGS[service], service, flags_of(line), {})
        if not config.listen.endswith(":0"):
            listening[service] = config.listen
        if service == "router":
            peers["router", "scheduler"], peers["router", "tokenizer"] = config.schedulers[0], config.tokenizers[0]
        elif service == "scheduler":
            peers["scheduler", "worker"], peers["scheduler", "kvstore"] = config.worker, config.kvstore
        elif service == "worker":
            peers["worker", "kvstore"] = config.kvstore
    assert len(peers) == 5
    assert len(set(listening.values())) == len(listening) == 4
    for (service, peer), address in peers.items():
        assert listening[peer] == address, f"the {service}'s README looks for the {peer} elsewhere"


def test_subcommands_take_what_the_documents_give_them() -> None:
    seen = 0
    for _, line in all_commands():
        command = re.sub(r" >>? \S+$", "", line)  # the file into which the shell writes what is printed
        words = shlex.split(command, comments=True) if line.startswith("quire ") else []
        if not words:
            continue
        parser = argparse.ArgumentParser(exit_on_error=False)
        registry.load(words[1]).add_arguments(parser)
        parser.parse_args(words[2:])
        seen += 1
    assert seen >= 3


def test_request_bodies_are_taken() -> None:
    seen = 0
    for _, line in all_commands():
        if line.startswith("curl "):
            body = json.loads(shlex.split(line)[shlex.split(line).index("-d") + 1])
            parse = parse_chat if "/chat/completions" in line else parse_completion
            assert parse(body, Limits(1, 0), timings=False).job.model in ("demo", "smollm2")
            seen += 1
    assert seen >= 5


def test_python_is_python() -> None:
    for path in DOCUMENTS:
        for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
            ast.parse(block)
