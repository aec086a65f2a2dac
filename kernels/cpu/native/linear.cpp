// Packing, and the linear with a team of threads.
#include "linear.h"

#include "repack.h"
#include "team.h"

using namespace tercet;

// What packing must reserve for a panel; -1 for a format that there is not.
TERCET_EXPORT int64_t tercet_panel_bytes(int format, int cols) {
    return format >= 0 && format < FORMATS ? panel_bytes(static_cast<Format>(format), cols) : -1;
}

// q [rows][cols], scale [rows][cols / per] or [rows], minimum like scale or null -> ceil(rows / 16) panels at out, zeroed before.
TERCET_EXPORT void tercet_pack_integers(int format, const uint8_t* q, const float* scale, const float* minimum,
                                        int rows, int cols, int is_signed, uint8_t* out) {
    const auto kind = static_cast<Format>(format);
    const int scales = LAYOUTS[kind].scales(ceil_div(cols, GROUP));
    const int64_t size = panel_bytes(kind, cols);
    for (int row = 0; row < rows; row += PANEL, out += size) {
        const int64_t at = int64_t{row} * scales;
        const Unpacked from{q + int64_t{row} * cols, scale + at, minimum ? minimum + at : nullptr, cols, is_signed != 0};
        pack_integers(kind, from, rows - row < PANEL ? rows - row : PANEL, out);
    }
}

// weights [rows][cols] -> ceil(rows / 16) panels at out, zeroed before.
TERCET_EXPORT void tercet_pack_floats(int format, const float* weights, int rows, int cols, uint8_t* out) {
    const auto kind = static_cast<Format>(format);
    for (int row = 0; row < rows; row += PANEL, out += panel_bytes(kind, cols))
        pack_floats(kind, weights + int64_t{row} * cols, cols, rows - row < PANEL ? rows - row : PANEL, out);
}

// ids [count], each below the matrix's rows; out [count][cols].
TERCET_EXPORT void tercet_decode_rows(Team* team, const Matrix* matrix, const int64_t* ids, int count, float* out) {
    team->each(count, [&](int i, int) {
        decode_row(*matrix, static_cast<int>(ids[i]), out + int64_t{i} * matrix->cols);
    });
}

// planes: 1 or 2; 0, of a matrix without integers, needs no scratch.
TERCET_EXPORT int64_t tercet_quantized_bytes(int rows, int cols, int planes) {
    return planes ? QuantizedRows::bytes(rows, cols, planes) : 0;
}

// x: rows `pitch` floats apart; scratch: tercet_quantized_bytes.
TERCET_EXPORT void tercet_quantize(Team* team, const float* x, int64_t pitch, int rows, int cols, int planes,
                                   void* scratch) {
    const QuantizedRows out = QuantizedRows::in(scratch, rows, cols, planes);
    team->each(rows, [&](int row, int) { quantize_row(x + row * pitch, row, out); });
}

// x [rows][cols] `pitch` floats apart, out [rows][matrix rows]; bias and residual (like out) may be null.
// scratch: tercet_quantized_bytes(rows, cols, planes of the matrix).
TERCET_EXPORT void tercet_linear(Team* team, const Matrix* matrix, const float* x, int64_t pitch, int rows,
                                 const float* bias, const float* residual, float* out, void* scratch) {
    if (rows == 0) return;
    Activations in{QuantizedRows::in(scratch, rows, matrix->cols, matrix->planes), x, pitch, rows};
    if (matrix->planes) team->each(rows, [&](int row, int) { quantize_row(x + row * pitch, row, in.quantized); });
    const Result result{out, matrix->rows, bias, residual, matrix->rows};
    const Chunks chunks = chunks_of(matrix->count, rows, team->size());
    team->each(chunks.count(), [&](int chunk, int) {
        linear(*matrix, in, chunks.panels_range(chunk), chunks.tiles_range(chunk), result);
    });
}

// silu(gate) * up: matrix of 2 inner rows that is_gated; x as for tercet_linear, out [rows][inner].
TERCET_EXPORT void tercet_gated(Team* team, const Matrix* matrix, const float* x, int64_t pitch, int rows, float* out,
                                void* scratch) {
    if (rows == 0) return;
    Activations in{QuantizedRows::in(scratch, rows, matrix->cols, matrix->planes), x, pitch, rows};
    if (matrix->planes) team->each(rows, [&](int row, int) { quantize_row(x + row * pitch, row, in.quantized); });
    const Chunks chunks = chunks_of(matrix->count / 2, rows, team->size());
    team->each(chunks.count(), [&](int chunk, int) {
        gated(*matrix, in, chunks.panels_range(chunk), chunks.tiles_range(chunk), out, matrix->rows / 2);
    });
}
