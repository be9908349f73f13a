"""`python -m tools.stage_site FOLDER` copies the content of the documentation site to a folder: all documents, and the
pictures and files next to them. They keep their places in the repository, so that links between them work.

The site has no source code. So a link to code or to a folder becomes plain text. tests/unit/test_docs.py checks that
links lead somewhere in the repository, and `mkdocs build --strict` checks that they lead somewhere in the site.

The site's Python-Markdown shows a list right below a line of text as text, unlike GitHub. So the copy has an empty line
there.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("*.md", "bench/*.md", "docs/**/*.md", "deploy/**/*.md", "services/*/README.md", "models/*/README.md")
BESIDE = ("docs/images/*", "docs/*.json")
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
_LIST_BELOW_TEXT = re.compile(r"^((?![-*] |\d+\. |[#|>\s]).+\n)(?=(?:[-*]|\d+\.) )", re.MULTILINE)
_FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)


def documents(root: Path = ROOT) -> list[Path]:
    """Every document of the repository, relative to its root."""
    return sorted(path.relative_to(root) for pattern in DOCUMENTS for path in root.glob(pattern))


def stage(folder: Path, root: Path = ROOT) -> list[Path]:
    """Write the site's source to an empty folder. Returns its documents, relative to the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    shown = documents(root)
    beside = [path.relative_to(root) for pattern in BESIDE for path in root.glob(pattern) if path.is_file()]
    for path in (*shown, *beside):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / path, folder / path)
    for path in shown:
        text = (folder / path).read_text(encoding="utf-8")
        text = with_lines_above_lists(without_links_to_code(text, path, {*shown, *beside}))
        (folder / path).write_text(text, encoding="utf-8")
    return shown


def without_links_to_code(text: str, document: Path, there: set[Path]) -> str:
    """Return the text with plain words in place of links to files that the site does not have. Code blocks stay
    unchanged."""

    def link(found: re.Match[str]) -> str:
        target = found[3]
        if not target or "://" in target or target.startswith("mailto:"):
            return found[0]
        return found[0] if _normal(document.parent / target) in there else found[2]

    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in _FENCE.split(text))


def with_lines_above_lists(text: str) -> str:
    """Return the text with an empty line between a line of text and a list right below it. Code blocks stay
    unchanged."""
    parts = _FENCE.split(text)
    return "".join(part if part.startswith("```") else _LIST_BELOW_TEXT.sub(r"\1\n", part) for part in parts)


def _normal(path: Path) -> Path:
    """The path without `..`, which is not looked up on disk."""
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts:
            parts.pop()
        else:
            parts.append(part)
    return Path(*parts)


def main() -> None:
    print(f"{len(stage(Path(sys.argv[1])))} documents")


if __name__ == "__main__":
    main()
