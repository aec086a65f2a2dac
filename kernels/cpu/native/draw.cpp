#include "draw.h"

#include "team.h"

using tercet::DrawOrder;
using tercet::DrawResult;
using tercet::DrawSpace;

// What each thread of a team needs, bytes.
TERCET_EXPORT int64_t tercet_draw_space_bytes(int64_t vocab) { return DrawSpace::bytes(vocab); }

// logits: [rows, vocab]. space: [team's size, tercet_draw_space_bytes(vocab)], zero at first, for one call at a time.
TERCET_EXPORT void tercet_draw(tercet::Team* team, const float* logits, int64_t vocab, int64_t rows,
                               const DrawOrder* orders, DrawResult* results, char* space) {
    team->each(static_cast<int>(rows), [&](int row, int thread) {
        const DrawSpace own(space + thread * DrawSpace::bytes(vocab), vocab);
        results[row] = tercet::draw_row(logits + row * vocab, static_cast<int>(vocab), orders[row], own);
    });
}
