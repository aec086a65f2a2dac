"""The back ends by name, each loaded when it is asked for."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch

from kernels.ops import Ops

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """threads: that compute, None takes one for each core. pin: threads to cores, where a back end has its own.

    cache: where native kernels are kept once built, None takes the user's. instruction_set: None takes the CPU's best.
    compiler: name or path, None takes the first found. activations: what `cpu` rounds them to where weights are
    integers, a name of kernels.cpu.pack.ACTIVATIONS. kv: of the pages, one of KV_FORMATS; None takes the first.
    """

    threads: int | None = None
    pin: bool = False
    cache: Path | None = None
    instruction_set: str | None = None
    compiler: str | None = None
    activations: str = "16bit"
    kv: str | None = None


def _reference(settings: BackendSettings) -> Ops:
    from kernels.reference import ReferenceOps

    _use_torch_threads(settings)
    return ReferenceOps()


def _cpu_torch(settings: BackendSettings) -> Ops:
    from kernels.vectorised.backend import VectorisedOps

    _use_torch_threads(settings)
    return VectorisedOps()


def _cpu(settings: BackendSettings) -> Ops:
    from kernels.cpu.backend import CpuOps
    from kernels.cpu.build import NoCompilerError
    from kernels.cpu.cores import available_cores
    from kernels.cpu.library import Team, load_library
    from kernels.cpu.pack import ACTIVATIONS

    if settings.activations not in ACTIVATIONS:
        raise ValueError(f"unknown activations {settings.activations!r}; there are {', '.join(ACTIVATIONS)}")
    try:
        library = load_library(settings.instruction_set, settings.cache, settings.compiler)
    except NoCompilerError as error:
        log.warning("the native kernels cannot be built (%s): cpu-torch serves in place of cpu, and is slower", error)
        return _cpu_torch(settings)
    cores = available_cores()
    team = Team(library, settings.threads or len(cores), cores if settings.pin else ())
    # Torch's own threads would fight with the team for the cores; what is left to torch is small.
    torch.set_num_threads(1)
    return CpuOps(library, team, settings.activations)


def _gpu(settings: BackendSettings) -> Ops:
    try:
        from kernels.gpu.backend import GpuOps
        from kernels.gpu.pages import PAGE_FORMATS
        from kernels.gpu.target import present_target
        from kernels.gpu.variants import Variants
    except ModuleNotFoundError as error:
        raise ValueError(f"the back end gpu needs the package {error.name}; it comes with the extra 'gpu'") from error
    _use_torch_threads(settings)
    target = present_target()
    counted = replace(target, launch=Variants(target.launch))
    return GpuOps(counted, PAGE_FORMATS[settings.kv or KV_FORMATS["gpu"][0]])


def _use_torch_threads(settings: BackendSettings) -> None:
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)


BACKENDS: dict[str, Callable[[BackendSettings], Ops]] = {
    "reference": _reference,
    "cpu": _cpu,
    "cpu-torch": _cpu_torch,
    "gpu": _gpu,
}
# What keys and values are kept in, the back end's own first.
KV_FORMATS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "reference": ("fp32",),
        "cpu": ("bf16",),
        "cpu-torch": ("bf16",),
        "gpu": ("bf16", "fp16", "fp32", "fp8", "int8"),
    }
)


def load(name: str, settings: BackendSettings | None = None) -> Ops:
    """Sets torch's number of threads, which is the process's.

    Raises ValueError for an unknown name, listing those there are, and for settings that cannot be; BuildError where
    native kernels should be built and the build fails; OSError.
    """
    if name not in BACKENDS:
        raise ValueError(f"unknown back end {name!r}; there are {', '.join(BACKENDS)}")
    chosen = settings if settings is not None else BackendSettings()
    if chosen.threads is not None and chosen.threads < 1:
        raise ValueError(f"threads must be at least 1, got {chosen.threads}")
    if chosen.kv is not None and chosen.kv not in KV_FORMATS[name]:
        raise ValueError(
            f"the back end {name} keeps keys and values in {', '.join(KV_FORMATS[name])}, not in {chosen.kv}"
        )
    return BACKENDS[name](chosen)
