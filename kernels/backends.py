"""The back ends by name, each loaded when it is asked for."""

from collections.abc import Callable

from kernels.ops import Ops


def _reference() -> Ops:
    from kernels.reference import ReferenceOps

    return ReferenceOps()


def _cpu() -> Ops:
    from kernels.vectorised.backend import CpuOps

    return CpuOps()


BACKENDS: dict[str, Callable[[], Ops]] = {"reference": _reference, "cpu": _cpu}


def load(name: str) -> Ops:
    """Raises ValueError for an unknown name, listing those there are."""
    if name not in BACKENDS:
        raise ValueError(f"unknown back end {name!r}; there are {', '.join(BACKENDS)}")
    return BACKENDS[name]()
