// y = W x of a packed matrix, over a range of panels and of tiles of rows. No threads, no allocation.
//
// A result is the sum of its row's groups in their order, whatever the tile: `add_up` for one row and for sixteen does
// the same operations. So its bits depend on that row alone.
#pragma once

#include "gate.h"
#include "sums.h"
#include "tiles.h"

namespace tercet {

// What a linear reads: the integers, the floats, or both, as the matrix says.
struct Activations {
    QuantizedRows quantized;
    const float* x;
    int64_t pitch;  // floats from row to row of x
    int rows;
};

struct Range {
    int begin, end;
};

// out[row][column] = residual[row][column] + (sum + bias[column]); bias and residual may be null. out may be residual.
struct Result {
    float* out;
    int64_t pitch;
    const float* bias;
    const float* residual;
    int64_t residual_pitch;
};

// sums [rows of the tile][PANEL]. The thread has its Tiles.
inline void sum_panel(const Panel& panel, int cols, const Activations& x, int tile, float* sums) {
    const Tiling tiling{x.rows};
    const int width = tiling.width(tile), most = widest(panel.format);
    if (is_integer(panel.format)) {
        const QuantizedTile rows = x.quantized.tile(tile);
#if defined(TERCET_AMX)
        if (is_tiled(panel.format, rows))
            return tiled_sums(panel.format, rows.planes, rows.width)(panel.data, ceil_div(cols, GROUP), rows, sums);
#endif
        const AddUp* add_up = integer_sums(panel.format, rows.planes);
        for (int t = 0, n; t < width; t += n) {
            n = width - t < most ? width - t : most;
            add_up[n - 1](panel.data, ceil_div(cols, GROUP), rows.from(t), sums + t * PANEL);
        }
    } else {
        const float* row = x.x + tiling.first(tile) * x.pitch;
        for (int t = 0, n; t < width; t += n) {
            n = width - t < most ? width - t : most;
            float_sums(panel.format)[n - 1](panel.data, cols, row + t * x.pitch, x.pitch, sums + t * PANEL);
        }
    }
}

inline void store_some(float* to, Lanes values, int count) {
    if (count == LANES)
        store(to, values);
    else
        store(to, values, count);
}
inline Lanes load_some(const float* from, int count) { return count == LANES ? load(from) : load(from, count); }

inline void linear(const Matrix& matrix, const Activations& x, Range panels, Range tiles, const Result& result) {
    const Tiling tiling{x.rows};
    const Tiles own(want_tiles(matrix, x.rows));
    for (int tile = tiles.begin; tile < tiles.end; tile++)
        for (int p = panels.begin; p < panels.end; p++) {
            const Panel& panel = matrix.panels[p];
            alignas(64) float sums[TILE * PANEL];
            sum_panel(panel, matrix.cols, x, tile, sums);
            const Lanes bias = result.bias ? load_some(result.bias + panel.first_row, panel.rows) : all(0.0f);
            for (int t = 0; t < tiling.width(tile); t++) {
                const int64_t row = tiling.first(tile) + t;
                Lanes y = load(sums + t * PANEL);
                if (result.bias) y = y + bias;
                if (result.residual)
                    y = y + load_some(result.residual + row * result.residual_pitch + panel.first_row, panel.rows);
                store_some(result.out + row * result.pitch + panel.first_row, y, panel.rows);
            }
        }
}

// A matrix of gate's rows and, as many, up's: whether no panel holds rows of both.
inline bool is_gated(const Matrix& matrix) {
    return matrix.count % 2 == 0 && matrix.rows % 2 == 0 &&
           matrix.panels[matrix.count / 2].first_row == matrix.rows / 2;
}

// silu(gate) * up of one panel of each: columns of `out`, from the first of row 0 of the tile on, rows `pitch` apart.
inline void gated_panel(const Matrix& matrix, const Activations& x, int pair, int tile, float* out, int64_t pitch) {
    const Panel& gate = matrix.panels[pair];
    alignas(64) float gates[TILE * PANEL], ups[TILE * PANEL];
    sum_panel(gate, matrix.cols, x, tile, gates);
    sum_panel(matrix.panels[matrix.count / 2 + pair], matrix.cols, x, tile, ups);
    for (int t = 0; t < Tiling{x.rows}.width(tile); t++)
        store_some(out + t * pitch, silu_mul(load(gates + t * PANEL), load(ups + t * PANEL)), gate.rows);
}

// pairs: panels of the gate, each with its panel of up. out [rows][pitch]. Only if is_gated(matrix).
inline void gated(const Matrix& matrix, const Activations& x, Range pairs, Range tiles, float* out, int64_t pitch) {
    const Tiling tiling{x.rows};
    const Tiles own(want_tiles(matrix, x.rows));
    for (int tile = tiles.begin; tile < tiles.end; tile++)
        for (int pair = pairs.begin; pair < pairs.end; pair++)
            gated_panel(matrix, x, pair, tile,
                        out + tiling.first(tile) * pitch + matrix.panels[pair].first_row, pitch);
}

// The same, quantized at once. spans: of the columns of `out`; only if each holds whole panels (gated_spans).
constexpr int PANELS_OF_SPAN = SPAN / PANEL;

inline bool gated_spans(const Matrix& matrix) {
    return is_gated(matrix) && matrix.rows == matrix.count * PANEL;
}

inline void gated(const Matrix& matrix, const Activations& x, Range spans, Range tiles, const QuantizedRows& out) {
    const Tiling tiling{x.rows};
    const Tiles own(want_tiles(matrix, x.rows));
    for (int tile = tiles.begin; tile < tiles.end; tile++)
        for (int span = spans.begin; span < spans.end; span++) {
            alignas(64) float values[TILE * SPAN];
            const int first = span * SPAN, cols = out.cols - first < SPAN ? out.cols - first : SPAN;
            for (int i = 0; i < cols / PANEL; i++)
                gated_panel(matrix, x, span * PANELS_OF_SPAN + i, tile, values + i * PANEL, SPAN);
            for (int t = 0; t < tiling.width(tile); t++)
                quantize_columns(values + t * SPAN, first, cols, tiling.first(tile) + t, out);
        }
}

// How a product is cut: chunk i is panels(i) x tiles(i). As many as keep `threads` evenly busy, each large enough to
// read weights in long runs.
struct Chunks {
    int panels, tiles;        // there are
    int panels_of, tiles_of;  // a chunk

    int across() const { return ceil_div(panels, panels_of); }
    int count() const { return across() * ceil_div(tiles, tiles_of); }
    Range panels_range(int chunk) const { return cut(chunk % across(), panels_of, panels); }
    Range tiles_range(int chunk) const { return cut(chunk / across(), tiles_of, tiles); }

private:
    static Range cut(int index, int size, int all) {
        return {index * size, (index + 1) * size < all ? (index + 1) * size : all};
    }
};

inline Chunks chunks_of(int panels, int rows, int threads) {
    constexpr int PER_THREAD = 6, MOST_PANELS = 16;
    const int tiles = Tiling{rows}.count();
    int panels_of = panels, tiles_of = 1;
    if (threads > 1) panels_of = ceil_div(panels * tiles, threads * PER_THREAD);
    if (panels_of > MOST_PANELS) panels_of = MOST_PANELS;
    if (panels_of > panels) panels_of = panels;
    if (panels_of < 1) panels_of = 1;
    return {panels, tiles, panels_of, tiles_of};
}

}  // namespace tercet
