"""Rotation, and the write of keys and values to their pages, in the pages' type.

Pages are [B, G, P, W] in memory: a KV head's tokens lie together. float pages have W = D; narrow ones (fp8, int8) are
bytes, W = D, and behind a block's bytes lie its scales, float32 [G, P]: a scale for each token and head.
"""

import triton
import triton.language as tl

from kernels.gpu.device.numbers import FP8_LARGEST, rounded, to_fp8, to_int8


@triton.jit
def store_token(
    low,
    high,
    pages,
    slot,
    head,
    keep,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    KV_KIND: tl.constexpr,
    HALF: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """low, high float32 [lines, HALF]: the halves of heads' vectors, 0 beyond. slot int64, head [lines]."""
    pair = tl.arange(0, HALF)[None, :]
    mask = keep[:, None] & (pair < HEAD_DIM // 2)
    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    line = head * BLOCK_SIZE + place  # of the block's [G, P]
    if KV_KIND == "float":
        to = pages + (block * (KV_HEADS * BLOCK_SIZE * HEAD_DIM) + line * HEAD_DIM)[:, None] + pair
        tl.store(to, rounded(low, pages.dtype.element_ty, INTERPRET), mask=mask)
        tl.store(to + HEAD_DIM // 2, rounded(high, pages.dtype.element_ty, INTERPRET), mask=mask)
    else:
        start = block * BLOCK_BYTES
        largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=1)
        if KV_KIND == "fp8":
            scale = largest * (1.0 / FP8_LARGEST)
        else:
            scale = largest * (1.0 / 127.0)
        # A row of zeros has scale 0: it is divided by 1 and read back as zeros.
        inverse = 1.0 / tl.where(scale > 0.0, scale, 1.0)
        to = pages + (start + line * HEAD_DIM)[:, None] + pair
        if KV_KIND == "fp8":
            tl.store(to, to_fp8(low * inverse[:, None]), mask=mask)
            tl.store(to + HEAD_DIM // 2, to_fp8(high * inverse[:, None]), mask=mask)
        else:
            tl.store(to, to_int8(low * inverse[:, None]).to(tl.uint8, bitcast=True), mask=mask)
            tl.store(to + HEAD_DIM // 2, to_int8(high * inverse[:, None]).to(tl.uint8, bitcast=True), mask=mask)
        scales = (pages + KV_HEADS * BLOCK_SIZE * HEAD_DIM).to(tl.pointer_type(tl.float32))
        tl.store(scales + (start // 4 + line), scale, mask=keep)


@triton.jit
def rope_cache_kernel(
    x,
    cos,
    sin,
    q_out,
    k_pages,
    v_pages,
    slots,
    rows,
    x_row,
    x_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    KV_KIND: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Grid (rows x heads / BLOCK). x [T, HEADS + 2 KV_HEADS, D]: queries turn into q_out [T, HEADS, D], keys turn into
    their pages, values go to theirs. KV_HEADS 0: there is nothing but queries. HALF: the power of two from D / 2.
    """
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    line = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, head = line // ALL, line % ALL
    there = row < rows
    pair = tl.arange(0, HALF)[None, :]
    inside = pair < HEAD_DIM // 2
    mask = there[:, None] & inside
    source = x + (row * x_row + head * x_head)[:, None] + pair
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    angle = (row * (HEAD_DIM // 2))[:, None] + pair
    c = tl.load(cos + angle, mask=mask, other=0.0)
    s = tl.load(sin + angle, mask=mask, other=0.0)
    # Fused where it is written so, and nowhere else: a row has the same bits in every kernel that turns it.
    low = tl.fma(first, c, -(second * s))
    high = tl.fma(second, c, first * s)
    is_query = mask & (head < HEADS)[:, None]
    to = q_out + ((row * HEADS + head) * HEAD_DIM)[:, None] + pair
    tl.store(to, rounded(low, q_out.dtype.element_ty, INTERPRET), mask=is_query)
    tl.store(to + HEAD_DIM // 2, rounded(high, q_out.dtype.element_ty, INTERPRET), mask=is_query)
    if KV_HEADS > 0:
        slot = tl.load(slots + row, mask=there, other=0)
        is_key = there & (head >= HEADS) & (head < HEADS + KV_HEADS)
        is_value = there & (head >= HEADS + KV_HEADS)
        store_token(
            low, high, k_pages, slot, head - HEADS, is_key,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_BYTES, KV_KIND, HALF, INTERPRET,
        )  # fmt: skip
        store_token(
            first, second, v_pages, slot, head - HEADS - KV_HEADS, is_value,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_BYTES, KV_KIND, HALF, INTERPRET,
        )  # fmt: skip


@triton.jit
def cache_write_kernel(
    k,
    v,
    k_pages,
    v_pages,
    slots,
    rows,
    k_row,
    k_head,
    v_row,
    v_head,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    KV_KIND: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Grid (rows x KV_HEADS / BLOCK)."""
    line = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, head = line // KV_HEADS, line % KV_HEADS
    there = row < rows
    pair = tl.arange(0, HALF)[None, :]
    mask = there[:, None] & (pair < HEAD_DIM // 2)
    slot = tl.load(slots + row, mask=there, other=0)
    source = k + (row * k_row + head * k_head)[:, None] + pair
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    store_token(
        low, high, k_pages, slot, head, there,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_BYTES, KV_KIND, HALF, INTERPRET,
    )  # fmt: skip
    source = v + (row * v_row + head * v_head)[:, None] + pair
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    store_token(
        low, high, v_pages, slot, head, there,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_BYTES, KV_KIND, HALF, INTERPRET,
    )  # fmt: skip
