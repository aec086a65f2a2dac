// The work of one step's attention, cut into items that any thread may take in any order.
//
// An item is a tile of rows of one sequence, with all query heads of one KV head, and the keys that they see. Where a
// step has few tiles, a tile's keys are cut too, at multiples of PIECE; whoever finishes the last of them merges. How
// items are cut changes no bit: keys are always summed by PIECE, and the sums merged in order.
#pragma once

#include <algorithm>

#include "pages.h"

namespace tercet {

constexpr int CHUNK = 64;       // keys that are scored before they are weighed
constexpr int PIECE = 256;      // keys that are summed before they are merged; a multiple of CHUNK
constexpr int TILE_ROWS = 96;   // of queries, heads counted

struct AttentionShape {
    PageShape pages;
    int heads;
    int window;  // a row sees so many keys, its own the last of them; 0: all up to its own

    int ratio() const { return heads / pages.kv_heads; }
    int tile_tokens() const { return std::max(1, TILE_ROWS / ratio()); }
    int padded_dim() const { return (pages.head_dim + UNIT - 1) / UNIT * UNIT; }
    // Of what is known of a row and a piece: its sum, its weights in 16 lanes, its maximum.
    int state_floats() const { return padded_dim() + UNIT + 1; }
    // The first key that a row of this position sees.
    int first_key(int position) const { return window ? std::max(0, position + 1 - window) : 0; }
};

// As kernels/ops.py has it.
struct PagedRows {
    int sequences;
    int64_t table_width;
    const int32_t* query_start;   // [sequences + 1]
    const int32_t* seq_lens;      // [sequences]
    const int32_t* block_tables;  // [sequences][table_width]
};

struct AttentionItem {
    int32_t sequence;
    int32_t kv_head;
    int32_t first_row;  // of the step
    int32_t rows;
    int32_t first_position;  // of first_row
    int32_t first_piece;
    int32_t end_piece;
    int32_t shares;    // items that these rows' keys are cut into
    int64_t merge;     // of a cut tile: its counter
    int64_t partials;  // of a cut tile: where its states lie, floats
    int64_t cost;
};

struct AttentionNeeds {
    int64_t items;
    int64_t merges;    // counters, int32, to be zero; they are zero again when all items are done
    int64_t partials;  // floats
};

// Fills `items` unless it is null. threads: how many will take items.
inline AttentionNeeds plan_attention(const PagedRows& step, const AttentionShape& shape, int threads,
                                     AttentionItem* items) {
    const int tile = shape.tile_tokens();
    int64_t tiles = 0;
    for (int i = 0; i < step.sequences; i++)
        tiles += (step.query_start[i + 1] - step.query_start[i] + tile - 1) / tile * shape.pages.kv_heads;
    const int64_t wanted = int64_t{4} * threads;
    const bool cut = threads > 1 && tiles < wanted;
    AttentionNeeds needs = {0, 0, 0};
    for (int i = 0; i < step.sequences; i++) {
        const int start = step.query_start[i], stop = step.query_start[i + 1];
        for (int first = start; first < stop; first += tile) {
            const int rows = std::min(tile, stop - first);
            const int position = step.seq_lens[i] - (stop - first);
            const int hidden = shape.first_key(position) / PIECE;
            const int pieces = (position + rows + PIECE - 1) / PIECE - hidden;
            const int shares = cut ? static_cast<int>(std::min<int64_t>(pieces, (wanted + tiles - 1) / tiles)) : 1;
            for (int head = 0; head < shape.pages.kv_heads; head++) {
                for (int share = 0; share < shares; share++) {
                    if (items) {
                        AttentionItem& item = items[needs.items];
                        const int begin = hidden + pieces * share / shares;
                        const int end = hidden + pieces * (share + 1) / shares;
                        item = {i, head, first, rows, position, begin, end, shares, needs.merges, needs.partials, 0};
                        const int keys = std::min(item.end_piece * PIECE, position + rows) - item.first_piece * PIECE;
                        item.cost = int64_t{keys} * rows;
                    }
                    needs.items++;
                }
                if (shares > 1) {
                    needs.merges++;
                    needs.partials += int64_t{pieces} * rows * shape.ratio() * shape.state_floats();
                }
            }
        }
    }
    if (items)  // the dearest first: what is taken last should be small
        std::stable_sort(items, items + needs.items, [](const auto& a, const auto& b) { return a.cost > b.cost; });
    return needs;
}

}  // namespace tercet
