"""From a model file and the settings of a process to a runner.

Owns: the order of it: read the configuration, plan memory, load weights, allocate the pool. Must not know: services.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from executor.cache import KvShape, allocate_pool, plan_memory
from executor.grammar.engine import GrammarVocabulary, engine_version
from executor.grammar.grammars import Grammars
from executor.loading.gguf import GgufError, GgufFile, find, open_gguf
from executor.loading.shortage import POOL, WEIGHTS, check_free, naming, start_table
from executor.models.model import ModelError
from executor.models.table import read_model_config
from executor.quant.table import SCHEMES
from executor.runner import Runner
from executor.step import Capacity
from kernels.backends import BackendSettings
from kernels.backends import load as load_backend
from kernels.ops import AttentionShape


def load_runner(
    path: Path,
    *,
    backend: str,
    block_size: int,
    max_batched_tokens: int,
    max_sequences: int,
    kv_memory_bytes: int | None = None,
    total_blocks: int | None = None,
    max_model_len: int | None = None,
    scheme: str = "native",
    activations: str = "16bit",
    threads: int | None = None,
    pin_threads: bool = False,
    kv: str | None = None,
    kernel_cache: Path | None = None,
    model_hash: str | None = None,
    grammar_vocabulary: Callable[[], GrammarVocabulary] | None = None,
) -> Runner:
    """Read, check and pack a GGUF model, and allocate its pool.

    kv_memory_bytes is for the pool and a step's temporaries together; give it or total_blocks. threads, pin_threads,
    kernel_cache, kv and activations are as in `BackendSettings`; torch's number of threads is set for the process.
    model_hash: its SHA-256 where it is known already. grammar_vocabulary: called in a thread of its own; None: no
    grammars are served. Weights are read from the file once and not mapped afterwards.
    Raises GgufError or ModelError for the file, MemoryPlanError or ValueError naming the setting, BuildError, OSError.
    """
    for name, value in (("max_batched_tokens", max_batched_tokens), ("max_sequences", max_sequences)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if scheme not in SCHEMES:
        raise ValueError(f"unknown quantization scheme {scheme!r}; there are {', '.join(SCHEMES)}")
    settings = BackendSettings(threads=threads, pin=pin_threads, cache=kernel_cache, activations=activations, kv=kv)
    ops = load_backend(backend, settings)
    model_hash = model_hash or _sha256(path)
    with open_gguf(path) as file:
        config = read_model_config(file.metadata)
        vocab_size = _vocab_size(file)
        attention = AttentionShape(config.heads, config.kv_heads, config.head_dim, block_size)
        cached = KvShape(config.layers, config.kv_heads, ops.page(attention)[2], ops.kv_dtype)
        activations_of_step = config.activation_bytes(vocab_size, max_batched_tokens, max_sequences)
        plan = plan_memory(
            cached,
            block_size=block_size,
            temporary_bytes=lambda longest: (
                activations_of_step + ops.workspace_bytes(attention, max_batched_tokens, max_sequences, longest)
            ),
            context_length=config.context_length,
            max_model_len=max_model_len,
            kv_memory_bytes=kv_memory_bytes,
            total_blocks=total_blocks,
        )
        stored = sum(len(file.raw(name)) for name in file.tensors)
        table = start_table(stored, plan.temporary_bytes, plan.pool_bytes)
        check_free(table, ops.free_memory())
        with naming(table, WEIGHTS):
            found = SCHEMES[scheme](file, ops)
            model = config.load(found, ops, vocab_size=vocab_size, max_model_len=plan.max_model_len)
    table = start_table(model.weight_bytes, plan.temporary_bytes, plan.pool_bytes)  # as they are once packed
    free = ops.free_memory()
    check_free(table, None if free is None else free + model.weight_bytes)
    with naming(table, POOL):
        pool = allocate_pool(cached, plan, ops.page_memory)
    capacity = Capacity(
        block_size=block_size,
        total_blocks=plan.total_blocks,
        max_batched_tokens=max_batched_tokens,
        max_sequences=max_sequences,
        max_model_len=plan.max_model_len,
        vocab_size=vocab_size,
    )
    numerics = (
        model_hash,
        scheme,
        ops.name,
        ops.instruction_set(),
        f"kv={ops.kv_format}",
        f"torch={torch.__version__}",
        f"deterministic={ops.deterministic}",
        f"grammar={engine_version()}",
    )
    return Runner(
        model=model,
        ops=ops,
        pool=pool,
        capacity=capacity,
        memory=plan,
        model_hash=model_hash,
        numerics=hashlib.sha256("\n".join(numerics).encode()).hexdigest(),
        grammars=None if grammar_vocabulary is None else Grammars(grammar_vocabulary),
    )


def _vocab_size(file: GgufFile) -> int:
    """Rows of the embedding, which the metadata must not contradict."""
    info = file.tensors.get("token_embd.weight")
    if info is None:
        raise GgufError("tensor 'token_embd.weight' is missing")
    if len(info.shape) != 2:
        raise GgufError(f"tensor 'token_embd.weight' has shape {list(info.shape)}, expected 2 dimensions")
    rows = info.shape[0]
    architecture = find(file.metadata, "general.architecture", str)
    stated = find(file.metadata, f"{architecture}.vocab_size", int)
    if stated is not None and stated != rows:
        raise ModelError(f"{architecture}.vocab_size is {stated}, but token_embd.weight has {rows} rows")
    return rows


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
