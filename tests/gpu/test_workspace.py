"""What a step on a GPU takes besides weights and pool: the executor's plan and `tercet plan` count the same."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.cache import KvShape, plan_memory
from executor.sizing.devices import find_device
from executor.sizing.formats import find_cache, find_weights
from executor.sizing.plan import Ask, activation_bytes, temporary_bytes
from executor.sizing.shapes import SHAPES, ModelShape
from kernels.gpu import attention
from kernels.gpu.backend import GpuOps
from kernels.gpu.launch import Launch
from kernels.gpu.launches import META
from kernels.gpu.target import Target
from kernels.ops import AttentionShape, PagedRows

LLAMA = SHAPES["llama-3.1-8b"]
MIB = 1 << 20


def ops(launched: list[Launch] | None = None) -> GpuOps:
    return GpuOps(Target(META, 90, 132, torch.bfloat16, [].append if launched is None else launched.append))


def attention_shape(shape: ModelShape) -> AttentionShape:
    return AttentionShape(shape.heads, shape.kv_heads, shape.head_dim, 16)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-70b", "smollm2-135m"])
@pytest.mark.parametrize("context", [200, 1024, 8192])
def test_the_executor_and_the_plan_agree(name: str, context: int) -> None:
    shape = SHAPES[name]
    ask = Ask(shape, find_device("h200"), find_weights("bf16"), find_cache("bf16"), context, 16, 64, 512)
    of_executor = activation_bytes(shape, 512, 64) + ops().workspace_bytes(attention_shape(shape), 512, 64, context)
    assert temporary_bytes(ask) == of_executor


def test_an_8b_model_starts_with_the_default_memory() -> None:
    """512 MiB, 512 tokens and 64 sequences a step are the settings' defaults."""
    kv = KvShape(LLAMA.layers, LLAMA.kv_heads, LLAMA.head_dim, torch.bfloat16)
    own = ops()

    def temporaries(longest: int) -> int:
        workspace = own.workspace_bytes(attention_shape(LLAMA), 512, 64, longest)
        return activation_bytes(LLAMA, 512, 64) + workspace

    plan = plan_memory(
        kv,
        block_size=16,
        temporary_bytes=temporaries,
        context_length=LLAMA.context,
        max_model_len=None,
        kv_memory_bytes=512 * MIB,
    )
    assert 1024 <= plan.max_model_len < 8192
    assert 500 * MIB < plan.pool_bytes + plan.temporary_bytes <= 512 * MIB
    assert temporaries(8192) - temporaries(256) < 300 * MIB  # it was 4.5 GB, whatever the length
    wide = plan_memory(
        kv,
        block_size=16,
        temporary_bytes=temporaries,
        context_length=LLAMA.context,
        max_model_len=8192,
        kv_memory_bytes=2048 * MIB,
    )
    assert wide.max_model_len == 8192


@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=40),
    counts=st.lists(st.integers(1, 64), min_size=40, max_size=40),
    kv_heads=st.sampled_from([1, 3, 8]),
    head_dim=st.sampled_from([64, 80, 128]),
)
def test_no_step_allocates_more(lengths: list[int], counts: list[int], kv_heads: int, head_dim: int) -> None:
    """Of any batch: the items, merges and tables of its plan, and the states that its launch gets."""
    launched: list[Launch] = []
    own = ops(launched)
    counts = [min(count, length) for count, length in zip(counts, lengths, strict=False)]
    shape = AttentionShape(4 * kv_heads, kv_heads, head_dim, 16)
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    tables = torch.zeros(len(lengths), -(-max(lengths) // 16), dtype=torch.int32)
    # On meta there is nothing to read: the plan is made on the CPU, where its tensors have sizes too.
    target = replace(own.target, device=torch.device("cpu"))
    plan = attention.plan(target, PagedRows(starts, torch.tensor(lengths, dtype=torch.int32), tables), shape)
    rows = sum(counts)
    pages = torch.empty(4, 16, kv_heads, head_dim, dtype=torch.bfloat16, device=META)
    q = torch.empty(rows, 4 * kv_heads, head_dim, device=META)
    attention.attend(own.target, q, pages, pages, plan, own.pages, 1.0)
    states = [launched[0].arguments[name] for name in ("part_values", "part_states")]
    taken = sum(each.nbytes for each in (plan.items, plan.merges, plan.tables, *states))
    assert taken <= own.workspace_bytes(shape, rows, len(lengths), max(lengths)) + 8  # a word each where none is split
