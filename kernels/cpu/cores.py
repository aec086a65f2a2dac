"""How many threads are worth having here, and on which cores.

Sources: Linux's CPU topology in sysfs, and the limits of control groups (cpu.max of version 2).
"""

import math
import os
from pathlib import Path


def available_cores(
    topology: Path = Path("/sys/devices/system/cpu"), quota: Path = Path("/sys/fs/cgroup/cpu.max")
) -> tuple[int, ...]:
    """One CPU of each physical core that this process may use, no more than its quota of time is worth."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores: dict[str, int] = {}
    for cpu in cpus:
        cores.setdefault(_read(topology / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu), cpu)
    return tuple(cores.values())[: _worth(quota)]


def _worth(quota: Path) -> int | None:
    """CPUs, rounded up; None without a limit."""
    granted, _, period = (_read(quota) or "max").partition(" ")
    if not (granted.isdigit() and period.isdigit() and int(period)):
        return None
    return max(1, math.ceil(int(granted) / int(period)))


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
