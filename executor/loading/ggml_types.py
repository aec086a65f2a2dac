"""GGML's tensor types: their numbers in a file, and how many bytes a block of each takes.

Owns: the one table of formats that are served. Must not know: files, torch, numpy.
"""

from dataclasses import dataclass
from enum import IntEnum


class GgmlType(IntEnum):
    """Tensor types that are served, with their numbers in the file."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30


# Known to the format and not served: here only so that a refusal can say which one it met.
UNSERVED_TYPES = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}


@dataclass(frozen=True, slots=True)
class Block:
    """`elements` consecutive values of a row are stored in `bytes` bytes."""

    elements: int
    bytes: int


BLOCKS: dict[GgmlType, Block] = {
    GgmlType.F32: Block(1, 4),
    GgmlType.F16: Block(1, 2),
    GgmlType.BF16: Block(1, 2),
    GgmlType.Q4_0: Block(32, 18),
    GgmlType.Q4_1: Block(32, 20),
    GgmlType.Q5_0: Block(32, 22),
    GgmlType.Q5_1: Block(32, 24),
    GgmlType.Q8_0: Block(32, 34),
    GgmlType.Q4_K: Block(256, 144),
    GgmlType.Q5_K: Block(256, 176),
    GgmlType.Q6_K: Block(256, 210),
}
