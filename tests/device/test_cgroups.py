"""Limits of the container are found in both versions of control groups, whatever the container shows of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cb_backend.device.cgroups import cpu_quota, memory_limit


def root(folder: Path, files: dict[str, str]) -> Path:
    """A root folder with those files under it."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "files, quota",
    [
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "100000 100000"}, 1.0),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "250000 100000"}, 2.5),
        ({"sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/docker/x",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            1.5,
        ),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None),
        (
            {
                "proc/self/cgroup": "1:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            None,
        ),
        ({}, None),
    ],
    ids=["v2", "v2-parent", "v2-no-proc", "v1-seen-from-inside", "v2-unlimited", "v1-unlimited", "no-cgroups"],
)
def test_the_quota_of_the_tightest_control_group_is_found(tmp_path, files, quota):
    assert cpu_quota(root(tmp_path, files)) == quota


@pytest.mark.parametrize(
    "files, limit",
    [
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "1073741824"}, 2**30),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/b/memory.max": "max",
                "sys/fs/cgroup/a/memory.max": "4096",
                "sys/fs/cgroup/memory.max": "8192",
            },
            4096,
        ),
        ({"sys/fs/cgroup/memory.max": "4096"}, 4096),
        (
            {"proc/self/cgroup": "5:memory:/docker/x", "sys/fs/cgroup/memory/memory.limit_in_bytes": "4096"},
            4096,
        ),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "max"}, None),
        ({"proc/self/cgroup": "3:cpu:/", "sys/fs/cgroup/memory/memory.limit_in_bytes": "4096"}, None),
        ({}, None),
    ],
    ids=["v2", "v2-parent", "v2-no-proc", "v1-seen-from-inside", "v2-unlimited", "another-controller", "no-cgroups"],
)
def test_the_memory_limit_of_the_tightest_control_group_is_found(tmp_path, files, limit):
    assert memory_limit(root(tmp_path, files)) == limit
