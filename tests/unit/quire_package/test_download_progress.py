"""The size of a folder into which another program downloads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from quire.hub.download_progress import folder_bytes


def test_folder_that_is_removed_while_it_is_measured_counts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("kept", 3), ("removed", 5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(bytes(size))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    scandir, link_bytes = os.scandir, (tmp_path / "link").lstat().st_size
    assert folder_bytes(tmp_path) == 8 + link_bytes

    def without_removed(path: Any) -> Any:
        if Path(path).name == "removed":
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", without_removed)
    assert folder_bytes(tmp_path) == 3 + link_bytes
