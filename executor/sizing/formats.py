"""How many bytes weights and cached tokens take, by format.

Owns: the tables of formats. Must not know: devices, how a kernel reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from executor.sizing.devices import PlanError
from executor.sizing.shapes import Matrix, ModelShape

_VECTOR_BYTES: Final = 4  # norms and biases are float32 in memory


@dataclass(frozen=True, slots=True)
class Storage:
    """bits: of a weight. group: columns that share what `group_bytes` are: scales and minima; 0: a whole row."""

    bits: int
    group: int = 0
    group_bytes: int = 0

    def row_bytes(self, cols: int) -> int:
        groups = -(-cols // self.group) if self.group else 1
        return -(-cols * self.bits // 8) + groups * self.group_bytes


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """ends: of the embedding and the head, which checkpoints of 8 and 4 bits often leave as they were. operand: what
    the products of layers compute in; "integers" is int8 on a CPU and bf16 where a kernel widens them first."""

    name: str
    layers: Storage
    ends: Storage
    operand: str = "bf16"

    def matrix_bytes(self, matrix: Matrix) -> int:
        """Of all that there are of it."""
        return matrix.times * matrix.rows * self.storage(matrix).row_bytes(matrix.cols)

    def storage(self, matrix: Matrix) -> Storage:
        return self.ends if matrix.embedding or matrix.head else self.layers

    def weight_bytes(self, shape: ModelShape) -> int:
        return sum(self.matrix_bytes(each) for each in shape.matrices()) + _VECTOR_BYTES * shape.vector_weights()

    def read_bytes(self, shape: ModelShape, rows: int) -> int:
        """What a step with so many rows must read of the weights: of a table that is only looked up, those rows."""
        total = _VECTOR_BYTES * shape.vector_weights()
        for each in shape.matrices():
            if each.embedding and not each.head:
                total += min(rows, each.rows) * self.ends.row_bytes(each.cols)
            else:
                total += self.matrix_bytes(each)
        return total


@dataclass(frozen=True, slots=True)
class FileWeights:
    """As a file has them. total: bytes of all tensors; lookup: of a table that is only looked up, 0 if it is tied."""

    total: int
    lookup: int
    name: str = "file"
    operand: str = "integers"

    def weight_bytes(self, shape: ModelShape) -> int:
        return self.total

    def read_bytes(self, shape: ModelShape, rows: int) -> int:
        return self.total - self.lookup + min(rows, shape.vocab) * self.lookup // shape.vocab


class Weights(Protocol):
    """What a plan needs of weights."""

    @property
    def name(self) -> str: ...
    @property
    def operand(self) -> str: ...
    def weight_bytes(self, shape: ModelShape) -> int: ...
    def read_bytes(self, shape: ModelShape, rows: int) -> int: ...


_BF16: Final = Storage(16)
_ROWS: Final = (
    WeightFormat("bf16", _BF16, _BF16),
    WeightFormat("fp8", Storage(8, 0, 4), _BF16, operand="fp8"),
    WeightFormat("int8", Storage(8, 0, 4), Storage(8, 0, 4), operand="integers"),  # the executor's scheme of that name
    WeightFormat("w8", Storage(8, 32, 2), Storage(8, 32, 2), operand="integers"),  # Q8_0
    WeightFormat("w4", Storage(4, 32, 2), Storage(8, 32, 2), operand="integers"),  # Q4_0, with ends in Q8_0
    WeightFormat("w4-minima", Storage(4, 32, 4), Storage(8, 32, 2), operand="integers"),  # Q4_1
    WeightFormat("w4-128", Storage(4, 128, 2), _BF16),  # GPTQ and AWQ
)
WEIGHT_FORMATS: Final[Mapping[str, WeightFormat]] = MappingProxyType({row.name: row for row in _ROWS})


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """Of a key's or value's number, and of what each token and head has besides."""

    bytes: int
    scale_bytes: int = 0

    def token_bytes(self, shape: ModelShape) -> int:
        """Keys and values of all layers."""
        return 2 * shape.layers * shape.kv_heads * (shape.head_dim * self.bytes + self.scale_bytes)


CACHE_FORMATS: Final[Mapping[str, CacheFormat]] = MappingProxyType(
    {
        "bf16": CacheFormat(2),
        "fp16": CacheFormat(2),
        "fp32": CacheFormat(4),
        "fp8": CacheFormat(1, 4),
        "int8": CacheFormat(1, 4),
    }
)


def find_weights(name: str) -> WeightFormat:
    """Raises PlanError."""
    if name not in WEIGHT_FORMATS:
        raise PlanError(f"unknown weights {name!r}; there are {', '.join(WEIGHT_FORMATS)}")
    return WEIGHT_FORMATS[name]


def find_cache(name: str) -> CacheFormat:
    """Raises PlanError."""
    if name not in CACHE_FORMATS:
        raise PlanError(f"unknown KV format {name!r}; there are {', '.join(CACHE_FORMATS)}")
    return CACHE_FORMATS[name]
