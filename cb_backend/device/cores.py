"""How many CPU threads an engine computes with, and why. Standard library only; nothing is set here.

More threads than cores make every parallel step wait for the thread that was not scheduled, and two threads on one
physical core share its vector units: so an engine takes the physical cores that it may use, and never more than that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .cgroups import cpu_quota

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Threads:
    """`reason` is for the log: who asked for `count`, or what limited it."""

    count: int
    reason: str


def choose_threads(
    num_threads: int | None = None, environ: Mapping[str, str] | None = None, root: Path = _ROOT
) -> Threads:
    """The configured number, else what `OMP_NUM_THREADS` asks for, else one per usable core; at most the usable cores.

    Args:
        num_threads: `EngineConfig.num_threads`.
        environ: default: the process's.
        root: where /proc and /sys are.
    """
    usable = usable_cores(root)
    wanted = wanted_threads(os.environ if environ is None else environ)
    asked, by = (num_threads, "num_threads") if num_threads else (wanted, "OMP_NUM_THREADS")
    if not asked:
        return usable
    if asked > usable.count:
        return Threads(usable.count, f"{by} asks for {asked}, but {usable.reason}")
    return Threads(asked, by)


def wanted_threads(environ: Mapping[str, str]) -> int:
    """What `OMP_NUM_THREADS` asks for on its outermost level ("4" or "4,2"); 0 where it asks for nothing readable."""
    first = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isascii() and first.isdigit() else 0


def usable_cores(root: Path = _ROOT) -> Threads:
    """Physical cores of the affinity mask, cut by the CPU quota of the container; at least 1."""
    mask = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = len({_siblings(cpu, root) for cpu in mask})
    quota = cpu_quota(root)
    if quota is not None and quota < cores:
        return Threads(max(1, int(quota)), f"the cgroup allows {quota:g} of {cores} cores")
    return Threads(cores, f"this process may use {cores} physical core{'s' * (cores != 1)}")


def _siblings(cpu: int, root: Path) -> str:
    """Names the physical core of a logical CPU: the list of all logical CPUs on it, or itself where nothing is said."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    for name in ("core_cpus_list", "thread_siblings_list"):
        try:
            return (topology / name).read_text(encoding="ascii").strip()
        except OSError:
            continue
    return str(cpu)
