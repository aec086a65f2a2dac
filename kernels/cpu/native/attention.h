// Attention over paged keys and values: a running softmax (arXiv:2205.14135) over chunks of keys, for tiles of rows.
//
// Queries, keys, weights and values are bfloat16, all sums float. A row's bits depend on its query and its keys and
// values alone: each of its sums runs over dimensions or tokens in order, from multiples of CHUNK and PIECE on, and
// what stands beside it in a tile has sums of its own. A key that a row doesn't see has weight 0 and adds 0.
//
// Rows of a tile are tokens times the query heads of the item's KV head, row t * ratio + h.
#pragma once

#include <atomic>
#include <cstring>

#include "attention_plan.h"
#include "pairs.h"

namespace tercet {

// Registers of scores: rows times units of keys; and of sums: rows times sixteen dimensions.
#if defined(TERCET_AVX512)
constexpr int MICRO_ROWS = 6, MICRO_WIDTH = 4;
#else
constexpr int MICRO_ROWS = 3, MICRO_WIDTH = 1;
#endif

constexpr int CHUNK_UNITS = CHUNK / UNIT;
constexpr float LOWEST = -1e30f;  // a maximum of no scores

struct AttentionStep {
    AttentionShape shape;
    PagedRows rows;
    float scale;  // of scores, positive
    const float* queries;  // [rows][heads][head_dim], query_stride floats apart
    int64_t query_stride;
    const bf16* key_pages;
    const bf16* value_pages;
    float* out;  // [rows][heads][head_dim], out_stride floats apart
    int64_t out_stride;
    int32_t* merges;
    float* partials;
};

// What is known of rows after some keys. sum [rows][padded_dim], weight [rows][UNIT], maximum [rows], log2 of the unit.
struct RowStates {
    float* sum;
    float* weight;
    float* maximum;
};

inline RowStates states_at(float* memory, int rows, int padded_dim) {
    float* weight = memory + int64_t{rows} * padded_dim;
    return {memory, weight, weight + int64_t{rows} * UNIT};
}

inline void clear(RowStates states, int rows, int padded_dim) {
    std::memset(states.sum, 0, sizeof(float) * rows * padded_dim);
    std::memset(states.weight, 0, sizeof(float) * rows * UNIT);
    std::fill(states.maximum, states.maximum + rows, LOWEST);
}

// A thread's memory for one item.
struct AttentionScratch {
    bf16* queries;    // [tile rows][padded_dim]
    bf16* tail;       // [UNIT][padded_dim]: values of a sequence's last unit
    bf16* keys;       // [CHUNK][padded_dim], where pages can't be read as they lie
    bf16* values;     // likewise
    float* piece;     // states of the tile's rows
    float* total;     // likewise

    static int64_t tile_rows(const AttentionShape& shape) { return int64_t{shape.tile_tokens()} * shape.ratio(); }
    static int64_t bytes(const AttentionShape& shape) {
        const int64_t rows = tile_rows(shape), narrow = (rows + UNIT + 2 * CHUNK) * shape.padded_dim();
        return (2 * narrow + 2 * 4 * (rows * shape.state_floats() + UNIT) + 63) / 64 * 64;
    }
    // memory: aligned to 64 bytes.
    AttentionScratch(const AttentionShape& shape, void* memory) {
        const int64_t rows = tile_rows(shape), dim = shape.padded_dim();
        queries = static_cast<bf16*>(memory);
        tail = queries + rows * dim;
        keys = tail + UNIT * dim;
        values = keys + CHUNK * dim;
        piece = reinterpret_cast<float*>(values + CHUNK * dim);
        total = piece + (rows * shape.state_floats() + UNIT - 1) / UNIT * UNIT;
    }
};

// Up to CHUNK keys, unit by unit as pages.h lays out units of 16 tokens of padded_dim dimensions.
struct KeyChunk {
    const bf16* keys[CHUNK_UNITS];
    const bf16* values[CHUNK_UNITS];
    int units;
};

// scores[r][u * UNIT + lane] of rows r < R and units u < W. queries [R][dim], scores [R][CHUNK].
template <int R, int W>
inline void score(const bf16* queries, int dim, const bf16* const* keys, float* scores) {
    Lanes sums[R][W];
    for (int r = 0; r < R; r++)
        for (int u = 0; u < W; u++) sums[r][u] = all(0.0f);
    for (int d = 0; d < dim; d += 2) {
        Pairs key[W];
        for (int u = 0; u < W; u++) key[u] = load_pairs(keys[u] + d * UNIT);
        for (int r = 0; r < R; r++) {
            const Pairs query = all_pairs(queries + r * dim + d);
            for (int u = 0; u < W; u++) sums[r][u] = add_products(sums[r][u], key[u], query);
        }
    }
    for (int r = 0; r < R; r++)
        for (int u = 0; u < W; u++) store(scores + r * CHUNK + u * UNIT, sums[r][u]);
}

// sums = sums * decay + weights @ values for rows r < R and dimensions [0, 16 W). weights [R][CHUNK], values from
// dimension 0 on, sums [R][dim].
template <int R, int W>
inline void weigh(const bf16* weights, const bf16* const* values, int first, int units, int dim, const float* decay,
                  float* sums) {
    Lanes sum[R][W];
    for (int r = 0; r < R; r++)
        for (int w = 0; w < W; w++) sum[r][w] = load(sums + r * dim + w * UNIT) * all(decay[r]);
    for (int u = 0; u < units; u++) {
        const bf16* unit = values[u] + first * 2;
        for (int pair = 0; pair < UNIT / 2; pair++) {
            Pairs value[W];
            for (int w = 0; w < W; w++) value[w] = load_pairs(unit + (pair * dim + w * UNIT) * 2);
            for (int r = 0; r < R; r++) {
                const Pairs weight = all_pairs(weights + r * CHUNK + u * UNIT + pair * 2);
                for (int w = 0; w < W; w++) sum[r][w] = add_products(sum[r][w], value[w], weight);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int w = 0; w < W; w++) store(sums + r * dim + w * UNIT, sum[r][w]);
}

// One row's scores of `units` units, of which it sees the first `seen` keys, to weights 2^(score * unit - maximum).
// Returns what earlier sums have to be multiplied with. weights [CHUNK], all of it written.
inline float soften(const float* scores, int seen, float unit, float* maximum, float* weight, bf16* weights) {
    constexpr float HIDDEN = -std::numeric_limits<float>::infinity();
    alignas(64) static constexpr bf16 ONES[2 * UNIT] = {
        0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80,
        0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80,
        0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80, 0x3f80};
    Lanes score[CHUNK_UNITS];
    Lanes highest = all(HIDDEN);
    for (int u = 0; u < CHUNK_UNITS; u++) {
        score[u] = first_or(load(scores + u * UNIT), std::clamp(seen - u * UNIT, 0, UNIT), HIDDEN);
        highest = max(score[u], highest);
    }
    const float before = *maximum;
    *maximum = std::max(before, largest_lane(highest) * unit);
    for (int u = 0; u < CHUNK_UNITS; u++)
        store_rounded(weights + u * UNIT, power_of_two_below_one(score[u] * all(unit) - all(*maximum)));
    alignas(64) float decay[LANES];
    store(decay, power_of_two_below_one(all(before - *maximum)));
    Lanes sum = load(weight) * all(decay[0]);
    for (int u = 0; u < CHUNK_UNITS; u += 2)
        sum = add_products(sum, load_pairs(weights + u * UNIT), load_pairs(ONES));
    store(weight, sum);
    return decay[0];
}

// R rows of a tile, one chunk. seen(r): how many of the chunk's keys row r sees.
template <int R, class Seen>
inline void attend_chunk(const bf16* queries, const KeyChunk& chunk, int dim, float unit, Seen seen, RowStates states) {
    int units = 0;
    for (int r = 0; r < R; r++) units = std::max(units, (seen(r) + UNIT - 1) / UNIT);
    if (units == 0) return;
    alignas(64) float scores[R * CHUNK];
    alignas(64) bf16 weights[R * CHUNK];
    float decay[R];
    int u = 0;
    for (; u + MICRO_WIDTH <= units; u += MICRO_WIDTH)
        score<R, MICRO_WIDTH>(queries, dim, chunk.keys + u, scores + u * UNIT);
    for (; u < units; u++) score<R, 1>(queries, dim, chunk.keys + u, scores + u * UNIT);
    for (int r = 0; r < R; r++)
        decay[r] = soften(scores + r * CHUNK, seen(r), unit, states.maximum + r, states.weight + r * UNIT,
                          weights + r * CHUNK);
    int d = 0;
    for (; d + MICRO_WIDTH * UNIT <= dim; d += MICRO_WIDTH * UNIT)
        weigh<R, MICRO_WIDTH>(weights, chunk.values, d, units, dim, decay, states.sum + d);
    for (; d < dim; d += UNIT) weigh<R, 1>(weights, chunk.values, d, units, dim, decay, states.sum + d);
}

template <class Seen>
inline void attend_chunk(int rows, const bf16* queries, const KeyChunk& chunk, int dim, float unit, Seen seen,
                         RowStates states) {
    switch (rows) {
        case 1: return attend_chunk<1>(queries, chunk, dim, unit, seen, states);
        case 2: return attend_chunk<2>(queries, chunk, dim, unit, seen, states);
        case 3: return attend_chunk<3>(queries, chunk, dim, unit, seen, states);
#if defined(TERCET_AVX512)
        case 4: return attend_chunk<4>(queries, chunk, dim, unit, seen, states);
        case 5: return attend_chunk<5>(queries, chunk, dim, unit, seen, states);
        case 6: return attend_chunk<6>(queries, chunk, dim, unit, seen, states);
#endif
    }
}

// Adds the sums over later keys to those over earlier ones.
inline void merge(RowStates later, int rows, int padded_dim, RowStates total) {
    for (int r = 0; r < rows; r++) {
        const float maximum = std::max(total.maximum[r], later.maximum[r]);
        const Lanes old = power_of_two_below_one(all(total.maximum[r] - maximum));
        const Lanes fresh = power_of_two_below_one(all(later.maximum[r] - maximum));
        for (int d = r * padded_dim; d < (r + 1) * padded_dim; d += UNIT)
            store(total.sum + d, load(total.sum + d) * old + load(later.sum + d) * fresh);
        const int at = r * UNIT;
        store(total.weight + at, load(total.weight + at) * old + load(later.weight + at) * fresh);
        total.maximum[r] = maximum;
    }
}

class AttentionTile {
public:
    AttentionTile(const AttentionStep& step, const AttentionItem& item, AttentionScratch& scratch)
        : step_(step), item_(item), scratch_(scratch), pages_(step.shape.pages), dim_(step.shape.padded_dim()),
          rows_(item.rows * step.shape.ratio()), length_(step.rows.seq_lens[item.sequence]),
          table_(step.rows.block_tables + item.sequence * step.rows.table_width),
          as_they_lie_(pages_.block_size % UNIT == 0 && pages_.head_dim % UNIT == 0) {}

    void attend() {
        pack_queries();
        const RowStates total = states_at(scratch_.total, rows_, dim_);
        if (item_.shares == 1) {
            clear(total, rows_, dim_);
            for (int piece = item_.first_piece; piece < item_.end_piece; piece++) {
                const RowStates states = states_at(scratch_.piece, rows_, dim_);
                attend_piece(piece, states);
                merge(states, rows_, dim_, total);
            }
            return finish(total);
        }
        float* partials = step_.partials + item_.partials;
        const int64_t size = int64_t{rows_} * step_.shape.state_floats();
        for (int piece = item_.first_piece; piece < item_.end_piece; piece++)
            attend_piece(piece, states_at(partials + piece * size, rows_, dim_));
        std::atomic_ref<int32_t> done(step_.merges[item_.merge]);
        if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < item_.shares) return;
        done.store(0, std::memory_order_relaxed);
        clear(total, rows_, dim_);
        const int pieces = (item_.first_position + item_.rows + PIECE - 1) / PIECE;
        for (int piece = 0; piece < pieces; piece++)
            merge(states_at(partials + piece * size, rows_, dim_), rows_, dim_, total);
        finish(total);
    }

private:
    void pack_queries() {
        const int ratio = step_.shape.ratio(), head_dim = pages_.head_dim;
        for (int r = 0; r < rows_; r++) {
            const float* query = step_.queries + (item_.first_row + r / ratio) * step_.query_stride +
                                 int64_t{item_.kv_head * ratio + r % ratio} * head_dim;
            bf16* packed = scratch_.queries + r * dim_;
            for (int d = 0; d < head_dim; d++) packed[d] = rounded(query[d]);
            std::fill(packed + head_dim, packed + dim_, bf16{0});
        }
    }

    void attend_piece(int piece, RowStates states) {
        clear(states, rows_, dim_);
        const int end = std::min((piece + 1) * PIECE, item_.first_position + item_.rows);
        for (int start = piece * PIECE; start < end; start += CHUNK) {
            const KeyChunk chunk = as_they_lie_ ? chunk_in_pages(start, end) : packed_chunk(start, end);
            attend_rows(start, chunk, states);
        }
    }

    void attend_rows(int start, const KeyChunk& chunk, RowStates states) {
        const int ratio = step_.shape.ratio();
        const float unit = step_.scale * 1.44269504088896341f;  // weights are powers of 2
        for (int first = 0; first < rows_; first += MICRO_ROWS) {
            const auto seen = [&](int r) {
                return std::clamp(item_.first_position + (first + r) / ratio + 1 - start, 0, CHUNK);
            };
            const RowStates part = {states.sum + first * dim_, states.weight + first * UNIT, states.maximum + first};
            attend_chunk(std::min(MICRO_ROWS, rows_ - first), scratch_.queries + first * dim_, chunk, dim_, unit, seen,
                         part);
        }
    }

    int64_t block(int place) const { return table_[place / pages_.block_size]; }

    // The unit that the sequence's end lies in is copied, with zeros for the values behind it.
    KeyChunk chunk_in_pages(int start, int end) {
        KeyChunk chunk;
        chunk.units = (std::min(CHUNK, end - start) + UNIT - 1) / UNIT;
        for (int u = 0; u < chunk.units; u++) {
            const int place = start + u * UNIT;
            const int64_t at = block(place) * pages_.page() +
                               (int64_t{item_.kv_head} * pages_.block_size + place % pages_.block_size) * dim_;
            chunk.keys[u] = step_.key_pages + at;
            chunk.values[u] = step_.value_pages + at;
            if (place + UNIT > length_) chunk.values[u] = with_zeros_behind(chunk.values[u], length_ - place);
        }
        return chunk;
    }

    const bf16* with_zeros_behind(const bf16* values, int tokens) {
        bf16* tail = scratch_.tail;
        const int whole = tokens / 2 * 2 * dim_;
        std::memcpy(tail, values, sizeof(bf16) * whole);
        std::memset(tail + whole, 0, sizeof(bf16) * (UNIT * dim_ - whole));
        if (tokens % 2)
            for (int d = 0; d < dim_; d++) tail[whole + 2 * d] = values[whole + 2 * d];
        return tail;
    }

    // For pages without whole units: the chunk as pages.h would lay it out, with zeros for what there is not.
    KeyChunk packed_chunk(int start, int end) {
        KeyChunk chunk;
        const int tokens = std::min(CHUNK, end - start);
        chunk.units = (tokens + UNIT - 1) / UNIT;
        std::memset(scratch_.keys, 0, sizeof(bf16) * CHUNK * dim_);
        std::memset(scratch_.values, 0, sizeof(bf16) * CHUNK * dim_);
        for (int t = 0; t < tokens; t++) {
            const int in_block = (start + t) % pages_.block_size;
            const Strided keys = key_elements(pages_, block(start + t), in_block, item_.kv_head);
            const Strided values = value_elements(pages_, block(start + t), in_block, item_.kv_head);
            bf16* packed_keys = scratch_.keys + t / UNIT * UNIT * dim_ + t % UNIT * 2;
            bf16* packed_values = scratch_.values + t / 2 * 2 * dim_ + t % 2;
            for (int d = 0; d < pages_.head_dim; d++) {
                packed_keys[d / 2 * UNIT * 2 + d % 2] = step_.key_pages[keys.start + d / 2 * keys.step + d % 2];
                packed_values[d * 2] = step_.value_pages[values.start + d * values.step];
            }
        }
        for (int u = 0; u < chunk.units; u++) {
            chunk.keys[u] = scratch_.keys + u * UNIT * dim_;
            chunk.values[u] = scratch_.values + u * UNIT * dim_;
        }
        return chunk;
    }

    void finish(RowStates total) {
        const int ratio = step_.shape.ratio(), head_dim = pages_.head_dim;
        for (int r = 0; r < rows_; r++) {
            float* out = step_.out + (item_.first_row + r / ratio) * step_.out_stride +
                         int64_t{item_.kv_head * ratio + r % ratio} * head_dim;
            const Lanes inverse = all(1.0f / sum(load(total.weight + r * UNIT)));
            int d = 0;
            for (; d + UNIT <= head_dim; d += UNIT) store(out + d, load(total.sum + r * dim_ + d) * inverse);
            if (d < head_dim) store(out + d, load(total.sum + r * dim_ + d) * inverse, head_dim - d);
        }
    }

    const AttentionStep& step_;
    const AttentionItem& item_;
    AttentionScratch& scratch_;
    const PageShape pages_;
    const int dim_;
    const int rows_;
    const int length_;
    const int32_t* table_;
    const bool as_they_lie_;
};

// Any thread may do any item; no two items write to the same place but the merges of cut tiles.
inline void attend(const AttentionStep& step, const AttentionItem& item, AttentionScratch& scratch) {
    AttentionTile(step, item, scratch).attend();
}

}  // namespace tercet
