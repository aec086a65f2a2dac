"""Attention over paged keys and values: one kernel for decodes, prefills and chunks of them.

A sequence's keys are cut every SPLIT tokens, counted from its beginning. Within a split the softmax runs over chunks of
BLOCK_KV keys (arXiv:1805.02867); splits are merged in order. A work item is a tile of query rows and either one split,
whose state goes to memory and is merged by `merge_kernel`, or all of them, merged as they come, by the same function
with the same operations. So a row's bits depend neither on the item nor on the tile it came in.
"""

import triton
import triton.language as tl

from kernels.gpu.device.numbers import FP8_UNIT, from_fp8, from_small_unsigned, rounded

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def merged(total, total_max, total_sum, part, part_max, part_sum):
    """Of two softmax states [rows, D], [rows], [rows], one. A state that saw nothing has maximum -inf and zeros."""
    highest = tl.maximum(total_max, part_max)
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    a = tl.exp2(total_max - finite)
    b = tl.exp2(part_max - finite)
    values = tl.fma(total, tl.broadcast_to(a[:, None], total.shape), part * b[:, None])
    return values, highest, tl.fma(total_sum, a, part_sum * b)


@triton.jit
def _finished(values, highest, weight, sinks, head, valid, HAS_SINKS: tl.constexpr):
    """values / weight; a sink is a key without a value, with a logit of its own for each head (gpt-oss)."""
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=valid, other=0.0) * LOG2E
        top = tl.maximum(highest, sink)
        factor = tl.exp2(highest - top)
        return values * factor[:, None] / tl.fma(weight, factor, tl.exp2(sink - top))[:, None]
    else:
        return values / tl.where(weight > 0.0, weight, 1.0)[:, None]


@triton.jit
def _operands(
    pages, block, place, head, d, visible,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_BYTES: tl.constexpr,
    PAD_D: tl.constexpr, KV_KIND: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """[tokens, D] and the tokens' scales. What is not visible reads as 0: 0 times a NaN would be a NaN."""
    line = head * BLOCK_SIZE + place
    mask = visible[:, None] if PAD_D == HEAD_DIM else visible[:, None] & (d < HEAD_DIM)[None, :]
    if KV_KIND == "float":
        start = block * (KV_HEADS * BLOCK_SIZE * HEAD_DIM) + line * HEAD_DIM
        values = tl.load(pages + start[:, None] + d[None, :], mask=mask, other=0.0).to(OPERAND)
        scale = visible.to(tl.float32)
    else:
        start = block * BLOCK_BYTES
        stored = tl.load(pages + (start + line * HEAD_DIM)[:, None] + d[None, :], mask=mask, other=0)
        scales = (pages + KV_HEADS * BLOCK_SIZE * HEAD_DIM).to(tl.pointer_type(tl.float32))
        scale = tl.load(scales + (start // 4 + line), mask=visible, other=0.0)
        if KV_KIND == "fp8":
            values = from_fp8(stored).to(OPERAND)
            scale = scale * FP8_UNIT
        else:
            values = from_small_unsigned(stored ^ 0x80, 128.0).to(OPERAND)
            values = tl.where(mask, values, 0.0)
    return values, scale


@triton.jit
def attention_kernel(
    q,
    k_pages,
    v_pages,
    tables,
    items,
    sinks,
    out,
    part_values,
    part_states,
    table_row,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    KV_KIND: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    SPLIT: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Grid (items, KV heads). A tile has BLOCK_M rows: tokens times the query heads of a KV head. Products of
    BLOCK_M x BLOCK_KV x D with OPERAND in and float32 out; the softmax in float32, base 2.

    items int32 [n, 8]: sequence (-1: nothing to do), first query row, tokens in the tile, position of the first,
    split (-1: all), part (where a single split's state goes).
    WINDOW: a row sees so many last keys, its own included; 0: all. SOFTCAP: cap * tanh(score / cap); 0: none.
    """
    item = items + tl.program_id(0) * 8
    sequence = tl.load(item)
    if sequence < 0:
        return
    first_row = tl.load(item + 1)
    tokens = tl.load(item + 2)
    position = tl.load(item + 3)
    split = tl.load(item + 4)
    head_kv = tl.program_id(1)

    RATIO: tl.constexpr = HEADS // KV_HEADS
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, PAD_D)
    token = m // RATIO
    head = head_kv * RATIO + m % RATIO
    valid = token < tokens
    at = position + token  # of the row in its sequence
    place_q = ((first_row + token).to(tl.int64) * HEADS + head) * HEAD_DIM
    in_q = valid[:, None] & (d < HEAD_DIM)[None, :]
    queries = rounded(tl.load(q + place_q[:, None] + d[None, :], mask=in_q, other=0.0), OPERAND, INTERPRET)

    end = position + tokens  # keys that some row of the tile sees: [begin, end)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(position - WINDOW + 1, 0)
    first_split = begin // SPLIT
    last_split = tl.cdiv(end, SPLIT)
    if split >= 0:
        first_split = split
        last_split = split + 1

    total = tl.zeros((BLOCK_M, PAD_D), tl.float32)
    total_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total_sum = tl.zeros((BLOCK_M,), tl.float32)
    for part in range(first_split, last_split):
        acc = tl.zeros((BLOCK_M, PAD_D), tl.float32)
        acc_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        acc_sum = tl.zeros((BLOCK_M,), tl.float32)
        low = part * SPLIT
        if WINDOW > 0:
            low = tl.maximum(low, begin // BLOCK_KV * BLOCK_KV)
        for start in range(low, tl.minimum((part + 1) * SPLIT, end), BLOCK_KV):
            key = start + tl.arange(0, BLOCK_KV)
            visible = key < end
            block = tl.load(tables + sequence.to(tl.int64) * table_row + key // BLOCK_SIZE, mask=visible, other=0)
            block = block.to(tl.int64)
            keys, key_scale = _operands(
                k_pages, block, key % BLOCK_SIZE, head_kv, d, visible,
                KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_BYTES, PAD_D, KV_KIND, OPERAND,
            )  # fmt: skip
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
            if KV_KIND == "float":
                scores = scores * scale
            else:
                scores = scores * (key_scale * scale)[None, :]
            if SOFTCAP > 0.0:
                twice = tl.exp2(scores * (2.0 * LOG2E / SOFTCAP))
                scores = SOFTCAP - 2.0 * SOFTCAP / (twice + 1.0)
            seen = (key[None, :] <= at[:, None]) & valid[:, None]
            if WINDOW > 0:
                seen = seen & (key[None, :] > at[:, None] - WINDOW)
            scores = tl.where(seen, scores * LOG2E, float("-inf"))
            raised = tl.maximum(acc_max, tl.max(scores, axis=1))
            finite = tl.where(raised == float("-inf"), 0.0, raised)
            factor = tl.exp2(acc_max - finite)
            weights = tl.exp2(scores - finite[:, None])
            acc_sum = tl.fma(acc_sum, factor, tl.sum(weights, axis=1))
            acc = acc * factor[:, None]
            values, value_scale = _operands(
                v_pages, block, key % BLOCK_SIZE, head_kv, d, visible,
                KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_BYTES, PAD_D, KV_KIND, OPERAND,
            )  # fmt: skip
            if KV_KIND != "float":
                weights = weights * value_scale[None, :]
            acc = tl.dot(rounded(weights, OPERAND, INTERPRET), values, acc, input_precision="ieee")
            acc_max = raised
        total, total_max, total_sum = merged(total, total_max, total_sum, acc, acc_max, acc_sum)

    if split >= 0:
        index = tl.load(item + 5).to(tl.int64) * KV_HEADS + head_kv
        place = (index * BLOCK_M + m)[:, None] * PAD_D + d[None, :]
        tl.store(part_values + place, total, mask=valid[:, None])
        tl.store(part_states + index * (2 * BLOCK_M) + m, total_max, mask=valid)
        tl.store(part_states + index * (2 * BLOCK_M) + BLOCK_M + m, total_sum, mask=valid)
    else:
        result = _finished(total, total_max, total_sum, sinks, head, valid, HAS_SINKS)
        tl.store(out + place_q[:, None] + d[None, :], rounded(result, out.dtype.element_ty, INTERPRET), mask=in_q)


@triton.jit
def merge_kernel(
    part_values,
    part_states,
    merges,
    sinks,
    out,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_D: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Grid (tiles that were split, KV heads). merges int32 [n, 4]: first query row, tokens (0: nothing to do), first
    part, parts."""
    merge = merges + tl.program_id(0) * 4
    first_row = tl.load(merge)
    tokens = tl.load(merge + 1)
    first_part = tl.load(merge + 2)
    parts = tl.load(merge + 3)
    if tokens == 0:
        return
    head_kv = tl.program_id(1)
    RATIO: tl.constexpr = HEADS // KV_HEADS
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, PAD_D)
    head = head_kv * RATIO + m % RATIO
    valid = m // RATIO < tokens
    total = tl.zeros((BLOCK_M, PAD_D), tl.float32)
    total_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total_sum = tl.zeros((BLOCK_M,), tl.float32)
    for part in range(0, parts):
        index = (first_part + part).to(tl.int64) * KV_HEADS + head_kv
        place = (index * BLOCK_M + m)[:, None] * PAD_D + d[None, :]
        values = tl.load(part_values + place, mask=valid[:, None], other=0.0)
        highest = tl.load(part_states + index * (2 * BLOCK_M) + m, mask=valid, other=float("-inf"))
        weight = tl.load(part_states + index * (2 * BLOCK_M) + BLOCK_M + m, mask=valid, other=0.0)
        total, total_max, total_sum = merged(total, total_max, total_sum, values, highest, weight)
    result = _finished(total, total_max, total_sum, sinks, head, valid, HAS_SINKS)
    place_q = ((first_row + m // RATIO).to(tl.int64) * HEADS + head) * HEAD_DIM
    mask = valid[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(out + place_q[:, None] + d[None, :], rounded(result, out.dtype.element_ty, INTERPRET), mask=mask)
