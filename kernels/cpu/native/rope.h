// Rotary embedding (arXiv:2104.09864) of the pairs (i, i + head_dim / 2), and with it the write of keys and values.
#pragma once

#include "pages.h"

namespace tercet {

// x and out [head_dim], cos and sin [head_dim / 2]. out may be x.
inline void rotate(const float* x, const float* cos, const float* sin, int head_dim, float* out) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; i++) {
        const float first = x[i], second = x[half + i];
        out[i] = first * cos[i] - second * sin[i];
        out[half + i] = second * cos[i] + first * sin[i];
    }
}

// The step's rows: qkv [rows][heads + 2 kv_heads][head_dim], stride floats apart.
struct RopeStep {
    PageShape shape;
    int heads;
    const float* qkv;
    int64_t stride;
    const float* cos;  // [.., head_dim / 2]
    const float* sin;
    const int64_t* positions;  // row t has cos and sin of positions[t]; null: of t
    const int64_t* slots;      // of row t: page * block_size + place
    bf16* key_pages;
    bf16* value_pages;
    float* queries;  // [rows][heads][head_dim], query_stride floats apart; may be where they lie in qkv
    int64_t query_stride;
};

// Rotates the queries and keys of rows [begin, end), writes keys and values to their slots. rotated: room for head_dim.
inline void rope_and_cache(const RopeStep& step, int64_t begin, int64_t end, float* rotated_key) {
    const int head_dim = step.shape.head_dim, kv_heads = step.shape.kv_heads;
    for (int64_t row = begin; row < end; row++) {
        const int64_t angle = (step.positions ? step.positions[row] : row) * (head_dim / 2);
        const float* cos = step.cos + angle;
        const float* sin = step.sin + angle;
        const float* query = step.qkv + row * step.stride;
        const float* key = query + int64_t{step.heads} * head_dim;
        const float* value = key + int64_t{kv_heads} * head_dim;
        for (int head = 0; head < step.heads; head++) {
            const int at = head * head_dim;
            rotate(query + at, cos, sin, head_dim, step.queries + row * step.query_stride + at);
        }
        for (int head = 0; head < kv_heads; head++) {
            const int at = head * head_dim;
            rotate(key + at, cos, sin, head_dim, rotated_key);
            write_slot(step.shape, step.slots[row], head, rotated_key, value + at, step.key_pages, step.value_pages);
        }
    }
}

}  // namespace tercet
