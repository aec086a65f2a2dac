"""The shapes of models: what their weights, their cache and their operations follow from.

Owns: the table of known models, and the count of weights. Must not know: files (`executor.sizing.files`), devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from executor.sizing.devices import PlanError


@dataclass(frozen=True, slots=True)
class Matrix:
    """times: how many a model has. embedding, head: which of the two it is, if any; a tied one is both."""

    name: str
    rows: int
    cols: int
    times: int
    embedding: bool = False
    head: bool = False


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder of the Llama kind. tied: the head is the embedding. qkv_bias; qk_norm: a norm of each head."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "inner", "heads", "kv_heads", "head_dim", "vocab", "context"):
            if getattr(self, field) < 1:
                raise PlanError(f"{self.name}: {field} must be at least 1, got {getattr(self, field)}")

    @property
    def qkv(self) -> int:
        """Rows of queries, keys and values together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def matrices(self) -> tuple[Matrix, ...]:
        attended = self.heads * self.head_dim
        ends: tuple[Matrix, ...] = (Matrix("embedding", self.vocab, self.hidden, 1, embedding=True, head=self.tied),)
        if not self.tied:
            ends += (Matrix("head", self.vocab, self.hidden, 1, head=True),)
        return (
            Matrix("qkv", self.qkv, self.hidden, self.layers),
            Matrix("attention output", self.hidden, attended, self.layers),
            Matrix("gate and up", 2 * self.inner, self.hidden, self.layers),
            Matrix("down", self.hidden, self.inner, self.layers),
            *ends,
        )

    def vector_weights(self) -> int:
        layer = 2 * self.hidden + (self.qkv if self.qkv_bias else 0) + (2 * self.head_dim if self.qk_norm else 0)
        return self.layers * layer + self.hidden

    def weights(self) -> int:
        """How many there are."""
        return sum(each.rows * each.cols * each.times for each in self.matrices()) + self.vector_weights()


_ROWS: Final = (
    ModelShape("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256, 131072),
    ModelShape("llama-3.1-70b", 80, 8192, 28672, 64, 8, 128, 128256, 131072),
    ModelShape("llama-3.2-1b", 16, 2048, 8192, 32, 8, 64, 128256, 131072, tied=True),
    ModelShape("llama-3.2-3b", 28, 3072, 8192, 24, 8, 128, 128256, 131072, tied=True),
    ModelShape("mistral-7b-v0.3", 32, 4096, 14336, 32, 8, 128, 32768, 32768),
    ModelShape("qwen2.5-7b", 28, 3584, 18944, 28, 4, 128, 152064, 131072, qkv_bias=True),
    ModelShape("qwen2.5-72b", 80, 8192, 29568, 64, 8, 128, 152064, 131072, qkv_bias=True),
    ModelShape("qwen3-8b", 36, 4096, 12288, 32, 8, 128, 151936, 40960, qk_norm=True),
    ModelShape("smollm2-135m", 30, 576, 1536, 9, 3, 64, 49152, 8192, tied=True),
)
SHAPES: Final[Mapping[str, ModelShape]] = MappingProxyType({row.name: row for row in _ROWS})
