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

#include "attention_chunk.h"

namespace tercet {

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

class AttentionTile {
public:
    AttentionTile(const AttentionStep& step, const AttentionItem& item, const AttentionItem* next,
                  AttentionScratch& scratch)
        : step_(step), item_(item), next_(next), scratch_(scratch), pages_(step.shape.pages), dim_(step.shape.padded_dim()),
          rows_(item.rows * step.shape.ratio()), length_(step.rows.seq_lens[item.sequence]),
          curve_(curve_of(step.scale, step.cap)), table_(step.rows.block_tables + item.sequence * step.rows.table_width),
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
