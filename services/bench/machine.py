"""What a run was measured on. No host name and no address: documents are passed on."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

from services.bench.document import Environment


def environment() -> Environment:
    return Environment(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        load_average=round(os.getloadavg()[0], 2),
        when=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
