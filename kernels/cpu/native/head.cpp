// The likeliest tokens of a few rows, with a team of threads.
#include "head.h"

#include "arena.h"
#include "norm.h"
#include "team.h"

using namespace tercet;

namespace {

struct HeadSpace {
    float* normed;     // [rows][cols]
    void* quantized;   // where the matrix has integers
    Likeliest* found;  // [rows][parts]
    int64_t bytes;

    HeadSpace(void* buffer, const Matrix& head, int rows, int parts) {
        Arena arena(buffer);
        normed = arena.take<float>(int64_t{rows} * head.cols);
        quantized = arena.take<uint8_t>(QuantizedRows::bytes(rows, head.cols, head.planes));
        found = arena.take<Likeliest>(int64_t{rows} * parts);
        bytes = arena.used();
    }
};

}  // namespace

TERCET_EXPORT int64_t tercet_head_bytes(const Matrix* head, int rows, int threads) {
    return HeadSpace(nullptr, *head, rows, chunks_of(head->count, rows, threads).across()).bytes;
}

// x [rows][cols], `pitch` floats apart, rows >= 1; norm [cols]. token_ids, highest: [rows], of the normed rows' logits;
// highest is NaN where any logit of the row is. space: tercet_head_bytes, aligned to 64.
TERCET_EXPORT void tercet_head_greedy(Team* team, const Matrix* head, const float* x, int64_t pitch, int rows,
                                      const float* norm, float eps, int64_t* token_ids, float* highest, void* space) {
    const Chunks chunks = chunks_of(head->count, rows, team->size());
    const int parts = chunks.across();
    const HeadSpace own(space, *head, rows, parts);
    Activations in{QuantizedRows::in(own.quantized, rows, head->cols, head->planes), own.normed, head->cols, rows};
    team->each(rows, [&](int row, int) {
        float* normed = own.normed + int64_t{row} * head->cols;
        rms_norm(x + row * pitch, norm, eps, head->cols, normed);
        if (head->planes) quantize_row(normed, row, in.quantized);
    });
    const Tiling tiling{rows};
    team->each(chunks.count(), [&](int chunk, int) {
        const Range tiles = chunks.tiles_range(chunk);
        for (int tile = tiles.begin; tile < tiles.end; tile++) {
            Likeliest found[TILE];
            head_likeliest(*head, in, chunks.panels_range(chunk), tile, found);
            for (int t = 0; t < tiling.width(tile); t++)
                own.found[int64_t{tiling.first(tile) + t} * parts + chunk % parts] = found[t];
        }
    });
    for (int row = 0; row < rows; row++) {
        Likeliest best;
        for (int part = 0; part < parts; part++) best.add(own.found[int64_t{row} * parts + part]);
        token_ids[row] = best.token_id;
        highest[row] = best.value;
    }
}
