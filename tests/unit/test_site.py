"""The documentation site shows every document of the repository once, and none of its links leads to code."""

from __future__ import annotations

import re
from pathlib import Path

from tools.stage_site import ROOT, documents, stage, with_lines_above_lists, without_links_to_code


def test_navigation_has_every_document_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = re.findall(r"(\S+\.md)$", navigation, re.MULTILINE)
    assert sorted(named) == sorted(map(str, documents())), "add the page to nav in mkdocs.yml"


def test_links_of_the_site_lead_to_what_it_has(tmp_path: Path) -> None:
    shown = stage(tmp_path / "site")
    links = 0
    for document in shown:
        text = re.sub(r"^```.*?^```", "", (tmp_path / "site" / document).read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            if "://" not in target and not target.startswith("mailto:"):
                links += 1
                assert (tmp_path / "site" / document.parent / target).is_file(), f"{document}: {target}"
    assert links > 100


def test_a_link_to_code_becomes_its_text() -> None:
    there = {Path("docs/a.md"), Path("README.md")}
    kept = "[a](a.md#x) [b](../README.md) [d](https://d) [e](#e)\n```\n[f](f.py)\n```\n"
    text = kept + "[`c`](../quire/c.py) and [folder](../quire)"
    assert without_links_to_code(text, Path("docs/b.md"), there) == kept + "`c` and folder"


def test_a_list_right_below_text_gets_an_empty_line() -> None:
    text = "Three things:\n- a\n  goes on\n- b\n\n1. one\n2. two\nand more\n1. three\n```\nx\n- y\n```\n# Title\n- c\n"
    expected = text.replace("things:\n", "things:\n\n").replace("and more\n", "and more\n\n")
    assert with_lines_above_lists(text) == expected


def test_the_site_has_no_list_right_below_text(tmp_path: Path) -> None:
    below = re.compile(r"^(?![-*] |\d+\. |[#|>\s]).+\n(?:[-*]|\d+\.) ", re.MULTILINE)
    for document in stage(tmp_path / "site"):
        text = re.sub(r"^```.*?^```", "", (tmp_path / "site" / document).read_text(), flags=re.MULTILINE | re.DOTALL)
        assert not below.search(text), document
    assert below.search((ROOT / "docs" / "operations.md").read_text()), "no page needs this any more"


def anchors(document: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_anchors_of_links_are_headings() -> None:
    seen = 0
    for document in documents():
        text = (ROOT / document).read_text()
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", text):
            path = ROOT / document.parent / target if target else ROOT / document
            if "://" not in target and path.suffix == ".md":
                seen += 1
                assert anchor in anchors(path), f"{document}: {target}#{anchor}"
    assert seen > 50
