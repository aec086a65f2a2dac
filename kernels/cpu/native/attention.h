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
    float cap;           // scores become cap * tanh(score / cap), after scaling; 0: they stay
    const float* sinks;  // [heads]: scores of a key without a value, which every row sees; null: there are none
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

// scores[r][u * UNIT + lane] of rows r < R and units u < W. queries [R][dim], scores [R][CHUNK]. With AHEAD, what lies
// at the same place of the units `ahead` is fetched.
template <int R, int W, bool AHEAD>
inline void score(const bf16* queries, int dim, const bf16* const* keys, const bf16* const* ahead, float* scores) {
    Lanes sums[R][W];
    for (int r = 0; r < R; r++)
        for (int u = 0; u < W; u++) sums[r][u] = all(0.0f);
    for (int d = 0; d < dim; d += 2) {
        Pairs key[W];
        for (int u = 0; u < W; u++) {
            key[u] = kept(load_pairs(keys[u] + d * UNIT));
            if constexpr (AHEAD) prefetch(ahead[u] + d * UNIT);
        }
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
template <int R, int W, bool AHEAD>
inline void weigh(const bf16* weights, const bf16* const* values, const bf16* const* ahead, int first, int units,
                  int dim, const float* decay, float* sums) {
    Lanes sum[R][W];
    for (int r = 0; r < R; r++)
        for (int w = 0; w < W; w++) sum[r][w] = load(sums + r * dim + w * UNIT) * all(decay[r]);
    for (int u = 0; u < units; u++) {
        const bf16* unit = values[u] + first * 2;
        for (int pair = 0; pair < UNIT / 2; pair++) {
            Pairs value[W];
            for (int w = 0; w < W; w++) {
                const int at = (pair * dim + w * UNIT) * 2;
                value[w] = kept(load_pairs(unit + at));
                if constexpr (AHEAD) prefetch(ahead[u] + first * 2 + at);
            }
            for (int r = 0; r < R; r++) {
                const Pairs weight = all_pairs(weights + r * CHUNK + u * UNIT + pair * 2);
                for (int w = 0; w < W; w++) sum[r][w] = add_products(sum[r][w], value[w], weight);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int w = 0; w < W; w++) store(sums + r * dim + w * UNIT, sum[r][w]);
}

// The keys of a chunk that a row sees: [begin, end).
struct Seen {
    int begin;
    int end;
};

// Scores of keys that a row doesn't see, of those in [0, end), to such as have weight 0.
inline void hide(float* scores, Seen seen, int end) {
    constexpr float HIDDEN = -std::numeric_limits<float>::infinity();
    for (int at = seen.end / UNIT * UNIT; at < end; at += UNIT)
        store(scores + at, first_or(load(scores + at), std::clamp(seen.end - at, 0, UNIT), HIDDEN));
    std::fill(scores, scores + seen.begin, HIDDEN);
}

// How scores become exponents of 2.
struct Curve {
    float unit;  // times the score, or what `cap` made of it
    float cap;
    float inner;  // times the score, twice what the hyperbolic tangent is taken of
};

constexpr float LOG2_E = 1.44269504088896341f;

inline Curve curve_of(const AttentionStep& step) {
    if (step.cap > 0) return {LOG2_E, step.cap, 2.0f * step.scale / step.cap};
    return {step.scale * LOG2_E, 0.0f, 0.0f};
}

// cap * tanh(score * inner / 2) for the scores in [0, end).
inline void flatten(float* scores, const Curve& curve, int end) {
    for (int at = 0; at < end; at += UNIT) {
        const Lanes grown = exp(load(scores + at) * all(curve.inner)) + all(1.0f);
        store(scores + at, (all(1.0f) - all(2.0f) / grown) * all(curve.cap));
    }
}

// R rows' scores of `units` units to weights 2^(score * unit - maximum), their sums added to `weight`. decay[r]: what
// earlier sums have to be multiplied with. An odd number of units is filled up with weights of 0.
template <int R, class SeenBy>
inline void soften(float* scores, int units, SeenBy seen, const Curve& curve, float* maximum, float* weight,
                   float* decay, bf16* weights) {
    const int end = (units + 1) / 2 * 2 * UNIT;
    alignas(64) float fall[LANES] = {};
    for (int r = 0; r < R; r++) {
        float* row = scores + r * CHUNK;
        if (curve.cap > 0) flatten(row, curve, end);
        const Seen part = seen(r);
        if (part.begin > 0 || part.end < end) hide(row, part, end);
        Lanes highest = load(row);
        for (int at = UNIT; at < end; at += UNIT) highest = max(load(row + at), highest);
        const float before = maximum[r];
        maximum[r] = std::max(before, largest_lane(highest) * curve.unit);
        fall[r] = before - maximum[r];
    }
    alignas(64) float decays[LANES];
    store(decays, power_of_two_below_one(load(fall)));
    const Pairs ones = rounded(all(1.0f), all(1.0f));
    for (int r = 0; r < R; r++) {
        decay[r] = decays[r];
        const Lanes rise = all(-maximum[r]);
        Lanes sum = load(weight + r * UNIT) * all(decays[r]);
        for (int at = 0; at < end; at += 2 * UNIT) {
            const float* row = scores + r * CHUNK + at;
            const Lanes first = coarse_power_of_two_below_one(fused(load(row), all(curve.unit), rise));
            const Lanes second = coarse_power_of_two_below_one(fused(load(row + UNIT), all(curve.unit), rise));
            const Pairs both = rounded(first, second);
            store(weights + r * CHUNK + at, both);
            sum = add_products(sum, both, ones);
        }
        store(weight + r * UNIT, sum);
    }
}

// R rows of a tile, one chunk. seen(r): the chunk's keys that row r sees. ahead: as many units, with AHEAD.
template <int R, bool AHEAD, class SeenBy>
inline void attend_chunk(const bf16* queries, const KeyChunk& chunk, const KeyChunk& ahead, int dim,
                         const Curve& curve, SeenBy seen, RowStates states) {
    int units = 0;
    for (int r = 0; r < R; r++) units = std::max(units, (seen(r).end + UNIT - 1) / UNIT);
    if (units == 0) return;
    alignas(64) float scores[R * CHUNK];
    alignas(64) bf16 weights[R * CHUNK];
    float decay[R];
    int u = 0;
    for (; u + MICRO_WIDTH <= units; u += MICRO_WIDTH)
        score<R, MICRO_WIDTH, AHEAD>(queries, dim, chunk.keys + u, ahead.keys + u, scores + u * UNIT);
    for (; u < units; u++) score<R, 1, AHEAD>(queries, dim, chunk.keys + u, ahead.keys + u, scores + u * UNIT);
    soften<R>(scores, units, seen, curve, states.maximum, states.weight, decay, weights);
    int d = 0;
    for (; d + MICRO_WIDTH * UNIT <= dim; d += MICRO_WIDTH * UNIT)
        weigh<R, MICRO_WIDTH, AHEAD>(weights, chunk.values, ahead.values, d, units, dim, decay, states.sum + d);
    for (; d < dim; d += UNIT) weigh<R, 1, AHEAD>(weights, chunk.values, ahead.values, d, units, dim, decay, states.sum + d);
}

template <bool AHEAD, class SeenBy>
inline void attend_chunk(int rows, const bf16* queries, const KeyChunk& chunk, const KeyChunk& ahead, int dim,
                         const Curve& curve, SeenBy seen, RowStates states) {
    switch (rows) {
        case 1: return attend_chunk<1, AHEAD>(queries, chunk, ahead, dim, curve, seen, states);
        case 2: return attend_chunk<2, AHEAD>(queries, chunk, ahead, dim, curve, seen, states);
        case 3: return attend_chunk<3, AHEAD>(queries, chunk, ahead, dim, curve, seen, states);
#if defined(TERCET_AVX512)
        case 4: return attend_chunk<4, AHEAD>(queries, chunk, ahead, dim, curve, seen, states);
        case 5: return attend_chunk<5, AHEAD>(queries, chunk, ahead, dim, curve, seen, states);
        case 6: return attend_chunk<6, AHEAD>(queries, chunk, ahead, dim, curve, seen, states);
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
    AttentionTile(const AttentionStep& step, const AttentionItem& item, const AttentionItem* next,
                  AttentionScratch& scratch)
        : step_(step), item_(item), next_(next), scratch_(scratch), pages_(step.shape.pages), dim_(step.shape.padded_dim()),
          rows_(item.rows * step.shape.ratio()), length_(step.rows.seq_lens[item.sequence]),
          curve_(curve_of(step)), table_(step.rows.block_tables + item.sequence * step.rows.table_width),
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
        const int64_t size = int64_t{rows_} * step_.shape.state_floats();
        const int first = first_key() / PIECE, end = (item_.first_position + item_.rows + PIECE - 1) / PIECE;
        const auto partial = [&](int piece) {
            return states_at(step_.partials + item_.partials + (piece - first) * size, rows_, dim_);
        };
        for (int piece = item_.first_piece; piece < item_.end_piece; piece++) attend_piece(piece, partial(piece));
        std::atomic_ref<int32_t> done(step_.merges[item_.merge]);
        if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < item_.shares) return;
        done.store(0, std::memory_order_relaxed);
        clear(total, rows_, dim_);
        for (int piece = first; piece < end; piece++) merge(partial(piece), rows_, dim_, total);
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
        const int end = std::min((piece + 1) * PIECE, seen_end(item_));
        for (int start = std::max(piece * PIECE, first_key() / CHUNK * CHUNK); start < end; start += CHUNK) {
            if (!as_they_lie_) {
                const KeyChunk chunk = packed_chunk(start, end);
                attend_rows<false>(0, start, chunk, chunk, states);
                continue;
            }
            const KeyChunk chunk = chunk_in_pages(start, end);
            attend_rows<true>(0, start, chunk, chunk_ahead(start + CHUNK, chunk), states);
            attend_rows<false>(MICRO_ROWS, start, chunk, chunk, states);
        }
    }

    // The tile's rows from `first` on; with AHEAD only one register tile of them, which is enough to fetch a chunk.
    template <bool AHEAD>
    void attend_rows(int first, int start, const KeyChunk& chunk, const KeyChunk& ahead, RowStates states) {
        const int ratio = step_.shape.ratio();
        const int end = AHEAD ? std::min(first + MICRO_ROWS, rows_) : rows_;
        for (; first < end; first += MICRO_ROWS) {
            const auto seen = [&](int r) {
                const int position = item_.first_position + (first + r) / ratio;
                return Seen{std::clamp(step_.shape.first_key(position) - start, 0, CHUNK),
                            std::clamp(position + 1 - start, 0, CHUNK)};
            };
            const RowStates part = {states.sum + first * dim_, states.weight + first * UNIT, states.maximum + first};
            attend_chunk<AHEAD>(std::min(MICRO_ROWS, end - first), scratch_.queries + first * dim_, chunk, ahead, dim_,
                                curve_, seen, part);
        }
    }

    // Of the item's first row.
    int first_key() const { return step_.shape.first_key(item_.first_position); }

    int64_t block(int place) const { return table_[place / pages_.block_size]; }

    // The first key that no row of the item sees.
    static int seen_end(const AttentionItem& item) {
        return std::min(item.end_piece * PIECE, item.first_position + item.rows);
    }

    KeyChunk units_in_pages(const AttentionItem& item, int start, int end) const {
        const int32_t* table = step_.rows.block_tables + item.sequence * step_.rows.table_width;
        KeyChunk chunk;
        chunk.units = (std::min(CHUNK, end - start) + UNIT - 1) / UNIT;
        for (int u = 0; u < chunk.units; u++) {
            const int place = start + u * UNIT;
            const int64_t in_block = int64_t{item.kv_head} * pages_.block_size + place % pages_.block_size;
            const int64_t at = table[place / pages_.block_size] * pages_.page() + in_block * dim_;
            chunk.keys[u] = step_.key_pages + at;
            chunk.values[u] = step_.value_pages + at;
        }
        return chunk;
    }

    // The unit that the sequence's end lies in is copied, with zeros for the values behind it.
    KeyChunk chunk_in_pages(int start, int end) {
        KeyChunk chunk = units_in_pages(item_, start, end);
        const int last = chunk.units - 1, left = length_ - (start + last * UNIT);
        if (left < UNIT) chunk.values[last] = with_zeros_behind(chunk.values[last], left);
        return chunk;
    }

    // What this thread probably reads next: more of this item from `start` on, or the beginning of the item after it.
    // Fetched while `chunk` is worked on, unit by unit; units that have no counterpart there are fetched at once.
    KeyChunk chunk_ahead(int start, const KeyChunk& chunk) const {
        const AttentionItem* item = &item_;
        if (start >= seen_end(item_)) {
            if (!next_) return chunk;
            item = next_;
            const int first = step_.shape.first_key(item->first_position) / CHUNK * CHUNK;
            start = std::max(item->first_piece * PIECE, first);
        }
        KeyChunk ahead = units_in_pages(*item, start, seen_end(*item));
        for (int u = ahead.units; u < chunk.units; u++) {
            ahead.keys[u] = chunk.keys[u];
            ahead.values[u] = chunk.values[u];
        }
        for (int u = chunk.units; u < ahead.units; u++) {
            for (int i = 0; i < UNIT * dim_; i += 2 * UNIT) {
                prefetch(ahead.keys[u] + i);
                prefetch(ahead.values[u] + i);
            }
        }
        return ahead;
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
            const Lanes inverse = all(inverse_weight(total, r, item_.kv_head * ratio + r % ratio));
            int d = 0;
            for (; d + UNIT <= head_dim; d += UNIT) store(out + d, load(total.sum + r * dim_ + d) * inverse);
            if (d < head_dim) store(out + d, load(total.sum + r * dim_ + d) * inverse, head_dim - d);
        }
    }

    // What a row's sum is to be multiplied with.
    float inverse_weight(RowStates total, int row, int head) const {
        const float weight = sum(load(total.weight + row * UNIT));
        if (!step_.sinks) return 1.0f / weight;
        const float sink = step_.sinks[head] * LOG2_E, maximum = std::max(total.maximum[row], sink);
        alignas(64) float shares[LANES] = {total.maximum[row] - maximum, sink - maximum};
        store(shares, power_of_two_below_one(load(shares)));
        return shares[0] / (weight * shares[0] + shares[1]);
    }

    const AttentionStep& step_;
    const AttentionItem& item_;
    const AttentionItem* next_;
    AttentionScratch& scratch_;
    const PageShape pages_;
    const int dim_;
    const int rows_;
    const int length_;
    const Curve curve_;
    const int32_t* table_;
    const bool as_they_lie_;
};

// Any thread may do any of the plan's items, in any order; a thread that does them in order finds the next one's first
// keys in its cache. No two items write to the same place but the merges of cut tiles.
inline void attend(const AttentionStep& step, const AttentionItem* items, int64_t count, int64_t index,
                   AttentionScratch& scratch) {
    const AttentionItem* next = index + 1 < count ? items + index + 1 : nullptr;
    AttentionTile(step, items[index], next, scratch).attend();
}

}  // namespace tercet
