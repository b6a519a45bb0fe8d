"""What the container allows this process, by its control groups of version 1 and 2: cores and memory.

The tightest group counts, the process's own or one above it. Standard library only. Psutil reads the machine, not these
limits (docs/decisions/libraries.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Cores that the process may use, also a part of one; None without a limit. `root`: where /proc and /sys are."""
    return min((quota for folder in _groups("cpu", root) if (quota := _quota(folder)) is not None), default=None)


def memory_limit(root: Path = _ROOT) -> int | None:
    """Bytes that the process may use; None without a limit. `root`: where /proc and /sys are."""
    return min((limit for folder in _groups("memory", root) if (limit := _limit(folder)) is not None), default=None)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The process's groups with all above them: cgroup 2 under /sys/fs/cgroup, cgroup 1 under its controller's name.

    A container may see its own group as the root while /proc names the host's path: folders that are absent are left
    to the reader.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = ["0::/"]
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _with_parents(mount, path)
        elif controller in controllers.split(","):
            for name in dict.fromkeys((controllers, controller)):
                yield from _with_parents(mount / name, path)


def _with_parents(mount: Path, path: str) -> Iterable[Path]:
    group = PurePosixPath(path.lstrip("/"))
    return (mount / part for part in (group, *group.parents))


def _quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
        return int(quota) / int(period) if quota != "max" and int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            return int((folder / name).read_text(encoding="ascii"))
        except (OSError, ValueError):  # absent, or "max"
            continue
    return None
