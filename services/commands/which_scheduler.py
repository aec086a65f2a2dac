"""Which schedulers a command asks: those that are named, else the one of a chain that `tercet up` runs here."""

import argparse
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from services.config import SchedulerConfig

FLAG: Final = "--scheduler"


def add_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        FLAG,
        help="host:port or unix:/path, several separated by commas; absent: that of `tercet up` on this machine, else "
        + default_target(),
    )


def default_target() -> str:
    return SchedulerConfig().net.listen


def which(given: str | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The targets, at least one: as given, or the newest socket of a chain on this machine, or the default address."""
    named = tuple(dict.fromkeys(part.strip() for part in (given or "").split(",") if part.strip()))
    if named:
        return named
    sockets: list[tuple[float, Path]] = []
    for folder in {environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir()} - {""}:
        found = Path(folder).glob("tercet-*/scheduler.sock")
        sockets.extend((path.stat().st_mtime, path) for path in found if os.access(path, os.R_OK | os.W_OK))
    return (f"unix:{max(sockets)[1]}" if sockets else default_target(),)
