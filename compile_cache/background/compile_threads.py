"""The number of the second process's compile workers, which torch calls compile threads."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
# torch has no more, on a host of any size (torch/_inductor/config.py).
_MOST = 32


def compile_threads() -> int:
    """One for every two CPUs that this process may use, at most 32; on two or three CPUs, two.

    torch would start one for each CPU, and ignore a container's quota. Then predictions have no CPU of their own: a low
    priority makes a worker's turns on a CPU shorter, but does not prevent them. And when a container has used up its
    quota, predictions stop too, whatever their priority.
    """
    allowed = len(os.sched_getaffinity(0))
    cpus = min(allowed, quota_cpus(CGROUP) or allowed)
    return min(_MOST, max(cpus // 2, min(cpus, 2)))


def quota_cpus(cgroup: Path) -> int:
    """The CPUs that a container's quota allows, rounded down, but at least 1; 0 without a quota.

    Sources: cgroup v2's `cpu.max` ("max 100000" or "150000 100000", in µs), and v1's `cpu.cfs_quota_us` (-1: none) and
    `cpu.cfs_period_us`.
    """
    try:
        if (both := cgroup / "cpu.max").exists():
            quota, period = both.read_text().split()
        else:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return max(1, int(quota) // int(period)) if int(quota) > 0 else 0
    except (OSError, ValueError, ZeroDivisionError):  # not Linux's files, or "max"
        return 0
