// Ops that treat each row alone.
#include "gate.h"
#include "norm.h"
#include "rope.h"
#include "team.h"

using tercet::Team;

namespace {

constexpr int ROWS_OF_CHUNK = 4;

// work(row) for every row, some rows a chunk.
template <class Work>
void each_row(Team* team, int rows, Work&& work) {
    team->each((rows + ROWS_OF_CHUNK - 1) / ROWS_OF_CHUNK, [&](int chunk, int) {
        const int end = std::min(rows, (chunk + 1) * ROWS_OF_CHUNK);
        for (int row = chunk * ROWS_OF_CHUNK; row < end; row++) work(row);
    });
}

}  // namespace

// x and out [rows, cols], weight [cols].
TERCET_EXPORT void tercet_rms_norm(Team* team, const float* x, const float* weight, float eps, int rows, int cols,
                                   float* out) {
    each_row(team, rows, [&](int row) {
        const int64_t at = int64_t{row} * cols;
        tercet::rms_norm(x + at, weight, eps, cols, out + at);
    });
}

// gate_up [rows, 2 inner], out [rows, inner].
TERCET_EXPORT void tercet_silu_mul(Team* team, const float* gate_up, int rows, int inner, float* out) {
    each_row(team, rows, [&](int row) {
        const float* gate = gate_up + int64_t{2} * row * inner;
        tercet::silu_mul(gate, gate + inner, inner, out + int64_t{row} * inner);
    });
}

// x and out [rows, heads, head_dim], cos and sin [rows, head_dim / 2].
TERCET_EXPORT void tercet_rope(Team* team, const float* x, const float* cos, const float* sin, int rows, int heads,
                               int head_dim, float* out) {
    each_row(team, rows, [&](int row) {
        const int64_t angle = int64_t{row} * (head_dim / 2);
        for (int64_t at = int64_t{row} * heads, end = at + heads; at < end; at++)
            tercet::rotate(x + at * head_dim, cos + angle, sin + angle, head_dim, out + at * head_dim);
    });
}
