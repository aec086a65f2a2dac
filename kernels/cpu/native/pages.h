// What lies where in a page of the cache: bfloat16 [block_size, kv_heads, head_dim] in size, laid out for attention.
//
// A page holds its KV heads one after the other, each [block_size, head_dim]: units of UNIT tokens, the last one shorter
// where block_size is no multiple. In a unit of n tokens
//   keys   lie as [head_dim / 2][n][2]: sixteen tokens' pairs of dimensions are one register;
//   values lie as [n / 2][head_dim][2]: sixteen dimensions' pairs of tokens are one register. An odd last token follows
//   alone.
// So both are read as they lie, without a shuffle. Offsets count elements and have 64 bits.
#pragma once

#include <algorithm>

#include "bf16.h"

namespace tercet {

constexpr int UNIT = 16;  // tokens: LANES of keys

struct PageShape {
    int block_size;
    int kv_heads;
    int head_dim;  // even

    int64_t page() const { return int64_t{block_size} * kv_heads * head_dim; }
};

// A token's key or value in a page: element d lies at start + (d / 2) * step for keys, + d % 2;
// at start + d * step for values.
struct Strided {
    int64_t start;
    int64_t step;
};

// place: of the token, in its page.
inline Strided key_elements(const PageShape& shape, int64_t block, int place, int head) {
    const int first = place / UNIT * UNIT, tokens = std::min(UNIT, shape.block_size - first);
    const int64_t unit = block * shape.page() + (int64_t{head} * shape.block_size + first) * shape.head_dim;
    return {unit + (place - first) * 2, int64_t{tokens} * 2};
}

inline Strided value_elements(const PageShape& shape, int64_t block, int place, int head) {
    const int even = place / 2 * 2;
    const bool alone = even + 1 == shape.block_size;
    const int64_t pair = block * shape.page() + (int64_t{head} * shape.block_size + even) * shape.head_dim;
    return {pair + (place - even), alone ? 1 : 2};
}

// key and value [head_dim], to slot (page and place) of both caches.
inline void write_slot(const PageShape& shape, int64_t slot, int head, const float* key, const float* value,
                       bf16* key_pages, bf16* value_pages) {
    const int64_t block = slot / shape.block_size;
    const int place = static_cast<int>(slot % shape.block_size);
    const Strided keys = key_elements(shape, block, place, head);
    for (int d = 0; d < shape.head_dim; d += 2) {
        bf16* pair = key_pages + keys.start + d / 2 * keys.step;
        pair[0] = rounded(key[d]);
        pair[1] = rounded(key[d + 1]);
    }
    const Strided values = value_elements(shape, block, place, head);
    for (int d = 0; d < shape.head_dim; d++) value_pages[values.start + d * values.step] = rounded(value[d]);
}

// The inverse of write_slot.
inline void read_slot(const PageShape& shape, int64_t slot, int head, const bf16* key_pages, const bf16* value_pages,
                      float* key, float* value) {
    const int64_t block = slot / shape.block_size;
    const int place = static_cast<int>(slot % shape.block_size);
    const Strided keys = key_elements(shape, block, place, head);
    const Strided values = value_elements(shape, block, place, head);
    for (int d = 0; d < shape.head_dim; d++) {
        key[d] = widened(key_pages[keys.start + d / 2 * keys.step + d % 2]);
        value[d] = widened(value_pages[values.start + d * values.step]);
    }
}

}  // namespace tercet
