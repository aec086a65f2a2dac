"""A launch as a value: what runs, on what, in how many programs.

Owns: how a launch is handed to Triton. Must not know: what the kernels do.
So that the compiler's report (`kernels.gpu.compiled`) is of the very launches that serving makes, it records them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Launch:
    """kernel: a function that Triton decorated. arguments: all of them by name, tensors, numbers and constants.

    fused: whether a multiplication and an addition may be rounded as one.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    warps: int
    stages: int = 3
    fused: bool = True


def run(launch: Launch) -> None:
    launch.kernel[launch.grid](
        **launch.arguments, num_warps=launch.warps, num_stages=launch.stages, enable_fp_fusion=launch.fused
    )
