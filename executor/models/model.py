"""What the runner needs of a model, whatever its architecture."""

from typing import Protocol

from torch import Tensor

from executor.batch import Batch
from executor.cache import KvPool
from executor.quant.native import NativeScheme
from kernels.ops import AttentionPlan, Ops
from kernels.sampling import Greedy


class ModelError(ValueError):
    """A checkpoint that cannot be served as it is: the message names the key or tensor."""


class Model(Protocol):
    @property
    def vocab_size(self) -> int: ...
    @property
    def weight_bytes(self) -> int:
        """Resident bytes of all weights."""
        ...

    def forward(self, batch: Batch, pool: KvPool) -> Tensor:
        """Writes the batch's keys and values to the pool. -> float32 [T, hidden], before the final norm."""
        ...

    def compute(
        self, token_ids: Tensor, positions: Tensor, slot_mapping: Tensor, plan: AttentionPlan, pool: KvPool
    ) -> Tensor:
        """As `forward`, of rows that are planned already. int64 [T] each, where the ops compute."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, hidden] -> float32 [rows, vocab_size]."""
        ...

    def greedy(self, hidden: Tensor) -> Greedy:
        """The likeliest token of each row, of which there is at least one."""
        ...


class ModelConfig(Protocol):
    """An architecture's settings, read from a file's metadata."""

    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def context_length(self) -> int: ...

    def activation_bytes(self, vocab_size: int, max_batched_tokens: int, max_sequences: int) -> int:
        """Upper bound of what a step holds beside weights, pool and the back end's workspace."""
        ...

    def load(self, scheme: NativeScheme, ops: Ops, *, vocab_size: int, max_model_len: int) -> Model:
        """Raises GgufError naming a tensor that is missing, misshapen or of no use."""
        ...
