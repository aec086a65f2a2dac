"""What devices can do, as plans reckon with it: memory, bandwidth, operations.

Owns: the table. Must not know: which device is here. Figures are of one device; `measured` names those that a program
has reached, all others are the maker's, for dense products.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

GIB: Final = 1 << 30


class PlanError(ValueError):
    """A plan that cannot be made: the message names the argument or the line, and the limit."""


@dataclass(frozen=True, slots=True)
class Device:
    """memory: bytes. bandwidth: bytes a second. operations: a second, by the type of the operands of a product, a
    multiplication and an addition being two. processors: streaming multiprocessors, 0 where there is none of that kind.
    cache: bytes of the last level.
    """

    name: str
    memory: int
    bandwidth: float
    operations: Mapping[str, float]
    processors: int = 0
    cache: int = 0
    measured: tuple[str, ...] = ()

    def rate(self, operand: str) -> float:
        """Of products with such operands; what the device has no instruction for is computed in bf16."""
        return self.operations.get(operand, self.operations["bf16"])

    def origin(self, figure: str) -> str:
        return "measured" if figure in self.measured else "data sheet"


_ROWS: Final = (
    # 4.3 TB/s is what a copy reaches, 790 Tflop/s what torch's bf16 product does; the sheet has 4.8 and 989.
    Device(
        "h200", 139 * GIB, 4.3e12, {"bf16": 790e12, "fp8": 1979e12, "int8": 1979e12}, 132, 50 << 20,
        ("bandwidth", "bf16", "memory"),
    ),
    Device("h100", 80 * 10**9, 3.35e12, {"bf16": 989e12, "fp8": 1979e12, "int8": 1979e12}, 132, 50 << 20),
    Device("a100", 80 * 10**9, 2.039e12, {"bf16": 312e12, "int8": 624e12}, 108, 40 << 20),
    Device("l4", 24 * 10**9, 300e9, {"bf16": 121e12, "fp8": 242e12, "int8": 242e12}, 58, 48 << 20),
    Device("rtx-4090", 24 * 10**9, 1.008e12, {"bf16": 165e12, "fp8": 330e12, "int8": 660e12}, 128, 72 << 20),
    # Two cores of a server: docs/kernels.md has the measurements. Integers are what nothing but `vpdpbusd` gives.
    Device("cpu", 16 * GIB, 40e9, {"bf16": 0.3e12, "integers": 0.945e12}, measured=("bandwidth", "bf16", "integers")),
)  # fmt: skip
DEVICES: Final[Mapping[str, Device]] = MappingProxyType({row.name: row for row in _ROWS})


def find_device(name: str) -> Device:
    """Raises PlanError."""
    if name not in DEVICES:
        raise PlanError(f"unknown device {name!r}; there are {', '.join(DEVICES)}")
    return DEVICES[name]
