// Paged attention and what belongs to it, for a team of threads.
#include "attention.h"

#include "rope.h"
#include "team.h"

using namespace tercet;

TERCET_EXPORT int64_t tercet_attention_scratch_bytes(const AttentionShape* shape) {
    return AttentionScratch::bytes(*shape);
}

// items: null to ask for what is needed alone.
TERCET_EXPORT void tercet_plan_attention(const PagedRows* rows, const AttentionShape* shape, int threads,
                                         AttentionItem* items, AttentionNeeds* needs) {
    *needs = plan_attention(*rows, *shape, threads, items);
}

// scratch: threads times tercet_attention_scratch_bytes, aligned to 64 bytes.
TERCET_EXPORT void tercet_attend(Team* team, const AttentionStep* step, const AttentionItem* items, int64_t count,
                                 char* scratch) {
    const int64_t bytes = AttentionScratch::bytes(step->shape);
    team->each(static_cast<int>(count), [&](int chunk, int thread) {
        AttentionScratch mine(step->shape, scratch + thread * bytes);
        attend(*step, items, count, chunk, mine);
    });
}

// keys and values float32 [slots][kv_heads][head_dim], strides in floats.
TERCET_EXPORT void tercet_cache_write(const PageShape* shape, int64_t rows, const float* keys, int64_t key_stride,
                                      const float* values, int64_t value_stride, const int64_t* slots, bf16* key_pages,
                                      bf16* value_pages) {
    for (int64_t row = 0; row < rows; row++)
        for (int head = 0; head < shape->kv_heads; head++)
            write_slot(*shape, slots[row], head, keys + row * key_stride + int64_t{head} * shape->head_dim,
                       values + row * value_stride + int64_t{head} * shape->head_dim, key_pages, value_pages);
}

TERCET_EXPORT void tercet_cache_read(const PageShape* shape, int64_t rows, const int64_t* slots, const bf16* key_pages,
                                     const bf16* value_pages, float* keys, float* values) {
    for (int64_t row = 0; row < rows; row++)
        for (int head = 0; head < shape->kv_heads; head++) {
            const int64_t at = (row * shape->kv_heads + head) * shape->head_dim;
            read_slot(*shape, slots[row], head, key_pages, value_pages, keys + at, values + at);
        }
}

// scratch: threads times head_dim floats.
TERCET_EXPORT void tercet_rope_and_cache(Team* team, const RopeStep* step, int64_t rows, float* scratch) {
    constexpr int64_t ROWS_OF_CHUNK = 16;
    team->each(static_cast<int>((rows + ROWS_OF_CHUNK - 1) / ROWS_OF_CHUNK), [&](int chunk, int thread) {
        rope_and_cache(*step, chunk * ROWS_OF_CHUNK, std::min(rows, (chunk + 1) * ROWS_OF_CHUNK),
                       scratch + int64_t{thread} * step->shape.head_dim);
    });
}
