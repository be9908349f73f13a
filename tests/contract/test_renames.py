"""tools/renames: what a map says is renamed, nothing else is, and a commit that did more is found."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.renames.apply_map import apply_map, rewrite
from tools.renames.prove_map import differences, merged, normal_form
from tools.renames.rename_map import load_map

MAP = """
[[module]]
old = "pack.bell"
new = "pack.service.event"

[[name]]
old = "Bell"
new = "Event"

[[name]]
old = "seat"
new = "slot"
within = "Room.enter"

[[attribute]]
old = "ring"
new = "set"
scope = ["pack/*"]

[[string]]
old = "the bell"
new = "the event"
"""
BELL = '''"""Bells."""


class Bell:
    """Rings."""

    __slots__ = ("count", "ring")

    def __init__(self, ring: int = 0) -> None:
        self.ring = ring  # comments stay


def seat(Bell: object) -> None:
    """Another one's."""
'''
ROOM = """from pack import bell
from pack.bell import Bell

NAMES = ["pack.bell.Bell", "the bell", "a bell"]


class Room:
    bell: Bell

    def enter(self, seat: int) -> object:
        self.bell.ring = seat
        return bell.Bell(ring=seat)

    def leave(self, seat: int) -> int:
        return seat
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository of two modules, committed."""
    (tmp_path / "pack").mkdir()
    for name, text in (("__init__", ""), ("bell", BELL), ("room", ROOM)):
        (tmp_path / "pack" / f"{name}.py").write_text(text)
    (tmp_path / "map.toml").write_text(MAP)
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "before"]):
        git(tmp_path, *command)
    return tmp_path


def git(folder: Path, *command: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *command], cwd=folder, check=True, capture_output=True)


def test_a_map_is_applied(tree: Path) -> None:
    apply_map(tree, load_map(tree / "map.toml"))
    event, room = (tree / "pack/service/event.py").read_text(), (tree / "pack/room.py").read_text()
    assert not (tree / "pack/bell.py").exists()
    assert "class Event:" in event and '("count", "set")' in event
    assert "self.set = ring  # comments stay" in event, "a parameter is a name, of which the map says nothing"
    assert "def seat(Event: object)" in event, "a name is renamed wherever it stands; `seat` only within its scope"
    assert "from pack.service import event\nfrom pack.service.event import Event\n" in room
    assert '["pack.service.event.Bell", "the event", "a bell"]' in room
    assert "    bell: Event\n" in room, "a field of the same name as the module"
    assert "def enter(self, slot: int)" in room and "self.bell.set = slot" in room
    assert "return event.Bell(set=slot)" in room, "attributes are renamed by rules of attributes"
    assert "def leave(self, seat: int) -> int:\n        return seat" in room


def test_a_commit_that_did_what_the_map_says_is_proved(tree: Path) -> None:
    renames = load_map(tree / "map.toml")
    apply_map(tree, renames)
    (tree / "pack/service/__init__.py").write_text('"""New."""\n')
    git(tree, "add", ".")
    git(tree, "commit", "-qm", "renamed")
    assert differences(tree, "HEAD", renames) == []


@pytest.mark.parametrize(
    ("old", "new"), [("return seat", "return seat + 1"), ("slot", "place"), ("the event", "an event")]
)
def test_a_commit_that_did_more_is_found(tree: Path, old: str, new: str) -> None:
    renames = load_map(tree / "map.toml")
    apply_map(tree, renames)
    room = tree / "pack/room.py"
    assert old in room.read_text()
    room.write_text(room.read_text().replace(old, new))
    git(tree, "add", ".")
    git(tree, "commit", "-qm", "renamed and more")
    assert differences(tree, "HEAD", renames) == ["pack/room.py"]


def test_an_identifier_is_both_name_and_attribute_within_the_maps_scope(tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text('scope = ["pack/*"]\nidentifier = [{ old = "bell", new = "event" }]')
    renames = load_map(tmp_path / "map.toml")
    source = "def ring(bell: int) -> None:\n    ring(bell=bell).bell()\n"
    assert rewrite(source, renames, "pack/a.py") == source.replace("bell", "event")
    assert rewrite(source, renames, "other/a.py") == source


def test_an_argument_by_keyword_may_keep_a_name_that_its_attribute_loses(tmp_path: Path) -> None:
    text = """
attribute = [{ old = "bell", new = "event" }, { old = "seat", new = "slot" }]
keyword = [{ old = "bell", new = "bell", within = "A.f" }]
"""
    (tmp_path / "map.toml").write_text(text)
    renames = load_map(tmp_path / "map.toml")
    source = "class A:\n    def f(self):\n        f(bell=self.bell, seat=1)\n\ng(bell=2)\n"
    wanted = "class A:\n    def f(self):\n        f(bell=self.event, slot=1)\n\ng(event=2)\n"
    assert rewrite(source, renames, "a.py") == wanted
    assert normal_form(source, renames, "a.py") == normal_form(wanted)


def test_an_attribute_is_renamed_of_those_alone_that_the_rule_names(tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text('attribute = [{ old = "ring", new = "set", on = ["Bell", "_bell"] }]')
    renames = load_map(tmp_path / "map.toml")
    source = """
class Bell:
    ring: int

    def all(self):
        return self.ring + Bell(ring=1).ring

class Room:
    def ring(self):
        self._bell.ring = self.ring = self.bell.ring
        return Room(ring=2)
"""
    wanted = source.replace("    ring: int", "    set: int").replace(
        "self.ring + Bell(ring=1).ring", "self.set + Bell(set=1).set"
    )
    wanted = wanted.replace("self._bell.ring", "self._bell.set")
    assert rewrite(source, renames, "a.py") == wanted
    assert normal_form(source, renames, "a.py") == normal_form(wanted)


@pytest.mark.parametrize(
    "source",
    [
        "def f(bell):\n    event = bell\n    return event\n",
        "def f(event):\n    return lambda: bell(event)\n",
        "class A:\n    bell: int\n    def event(self):\n        pass\n",
        "class A:\n    def f(self):\n        self.bell = self.event\n",
    ],
)
def test_names_that_a_map_would_make_one_are_found(source: str, tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text('identifier = [{ old = "bell", new = "event" }]')
    renames = load_map(tmp_path / "map.toml")
    assert merged(source, renames, "pack/a.py")
    assert not merged(source.replace("event", "bells"), renames, "pack/a.py")


def test_text_in_an_f_string_is_no_literal_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text('string = [{ old = "bell", new = "event" }]')
    renames = load_map(tmp_path / "map.toml")
    source = "f('bell', f'bell{g(\"bell\")}')\n"
    wanted = "f('event', f'bell{g(\"event\")}')\n"
    assert rewrite(source, renames, "a.py") == wanted
    assert normal_form(source, renames, "a.py") == normal_form(wanted)


def test_docstrings_and_the_order_of_imports_do_not_count() -> None:
    one = '"""A."""\nimport a\nimport b\n__all__ = ["x", "y"]\n'
    other = '"""B."""\nimport b\nimport a\n__all__ = ["y", "x"]\n'
    assert normal_form(one) == normal_form(other)
    assert normal_form(one) != normal_form(one.replace("import a", "import c"))


def test_an_empty_map_changes_no_file_of_this_repository(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    renames = load_map(tmp_path / "empty.toml")
    for path in (Path(__file__), Path(__file__).parents[2] / "services/common/quire_common/config.py"):
        assert rewrite(path.read_text(), renames, str(path)) == path.read_text()


@pytest.mark.parametrize(
    "text",
    [
        "[[method]]\nold='a'\nnew='b'",
        "[[name]]\nold='a'",
        "[[name]]\nold='a'\nnew='b'\nx=1",
        "[[name]]\nold='a'\nnew='b'\non=['c']",
    ],
)
def test_a_map_with_mistakes_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text(text)
    with pytest.raises(ValueError, match=r"map\.toml"):
        load_map(tmp_path / "map.toml")
