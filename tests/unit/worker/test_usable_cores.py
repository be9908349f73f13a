"""How many cores a process may use: made-up trees of /proc and /sys, as Docker, Kubernetes and systemd make them."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire_worker.threads.cores import usable_cores

V2 = "31 24 0:27 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = "36 30 0:32 {root} /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct"
HYBRID = "37 30 0:33 / /sys/fs/cgroup/unified rw,nosuid - cgroup2 cgroup2 rw"


def _tree(root: Path, groups: str, mounts: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def test_affinity_alone(tmp_path: Path) -> None:
    assert usable_cores(tmp_path, affinity=6) == 6


@pytest.mark.parametrize(
    ("quota", "cores"), [("200000 100000", 2), ("150000 100000", 1), ("50000 100000", 1), ("max 100000", 8)]
)
def test_version_2(tmp_path: Path, quota: str, cores: int) -> None:
    files = {"sys/fs/cgroup/pod/box/cpu.max": quota}
    assert usable_cores(_tree(tmp_path, "0::/pod/box", V2.format(root="/"), files), affinity=8) == cores


def test_the_tightest_group_around_it_counts(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/pod/box/cpu.max": "400000 100000", "sys/fs/cgroup/pod/cpu.max": "300000 100000"}
    assert usable_cores(_tree(tmp_path, "0::/pod/box", V2.format(root="/"), files), affinity=8) == 3


def test_a_namespace_of_its_own(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/cpu.max": "200000 100000"}
    assert usable_cores(_tree(tmp_path, "0::/", V2.format(root="/"), files), affinity=8) == 2


@pytest.mark.parametrize(("quota", "cores"), [("250000", 2), ("-1", 8)])
def test_version_1(tmp_path: Path, quota: str, cores: int) -> None:
    folder = "sys/fs/cgroup/cpu,cpuacct/box"
    files = {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "100000"}
    groups = "5:memory:/other\n3:cpu,cpuacct:/box\n0::/"
    tree = _tree(tmp_path, groups, f"{V1.format(root='/')}\n{HYBRID}", files)
    assert usable_cores(tree, affinity=8) == cores


@pytest.mark.parametrize("root", ["/docker/1234", "/"])
def test_a_container_that_sees_the_hosts_path(tmp_path: Path, root: str) -> None:
    folder = "sys/fs/cgroup/cpu,cpuacct"
    files = {f"{folder}/cpu.cfs_quota_us": "300000", f"{folder}/cpu.cfs_period_us": "100000"}
    tree = _tree(tmp_path, "3:cpu,cpuacct:/docker/1234", V1.format(root=root), files)
    assert usable_cores(tree, affinity=8) == 3


def test_a_group_beside_the_mounted_one_is_not_inside_it(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/cpu.max": "max 100000", "sys/fs/cgroup/b/cpu.max": "100000 100000"}
    assert usable_cores(_tree(tmp_path, "0::/ab", V2.format(root="/a"), files), affinity=8) == 8
    assert usable_cores(_tree(tmp_path, "0::/a/b", V2.format(root="/a"), files), affinity=8) == 1


def test_spaces_in_the_paths_of_a_mount(tmp_path: Path) -> None:
    mount = r"31 24 0:27 /a\040pod /sys/fs/c\134\040group rw,nosuid - cgroup2 cgroup2 rw"
    files = {r"sys/fs/c\ group/box/cpu.max": "200000 100000"}
    assert usable_cores(_tree(tmp_path, "0::/a pod/box", mount, files), affinity=8) == 2


def test_affinity_below_the_quota(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/cpu.max": "400000 100000"}
    assert usable_cores(_tree(tmp_path, "0::/", V2.format(root="/"), files), affinity=2) == 2


def test_what_cannot_be_understood_is_left_alone(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/cpu.max": "lots of it"}
    tree = _tree(tmp_path, "nonsense\n0::/", f"short\n{V2.format(root='/')}", files)
    assert usable_cores(tree, affinity=4) == 4


def test_this_machine() -> None:
    assert usable_cores() >= 1
