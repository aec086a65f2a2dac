// The likeliest token of each row, found while the head's panels are multiplied: no logits are kept.
#pragma once

#include <cstdint>
#include <limits>

#include "linear.h"

namespace tercet {

// Of some of a row's logits. value is NaN where any of them is; then token_id means nothing.
struct Likeliest {
    float value = -std::numeric_limits<float>::infinity();
    int32_t token_id = std::numeric_limits<int32_t>::max();

    // The larger one; of equals the lower id. So the order in which parts are added does not matter.
    void add(const Likeliest& other) {
        if (value != value) return;
        if (other.value != other.value || other.value > value ||
            (other.value == value && other.token_id < token_id))
            *this = other;
    }
};

// Whether a lane is larger than `most`, or NaN.
inline bool any_above(Lanes values, float most) {
#if defined(TERCET_AVX512)
    return _mm512_cmp_ps_mask(values.v, _mm512_set1_ps(most), _CMP_NLE_UQ) != 0;
#elif defined(TERCET_AVX2)
    const __m256 least = _mm256_set1_ps(most);
    const __m256 low = _mm256_cmp_ps(values.low, least, _CMP_NLE_UQ);
    return _mm256_movemask_ps(_mm256_or_ps(low, _mm256_cmp_ps(values.high, least, _CMP_NLE_UQ))) != 0;
#else
    bool any = false;
    for (int r = 0; r < LANES; r++) any |= !(values.v[r] <= most);
    return any;
#endif
}

// out [rows of the tile]: of the rows of the matrix in these panels. Few of them hold a larger logit than those before,
// so mostly one comparison is all that a panel costs.
inline void head_likeliest(const Matrix& head, const Activations& x, Range panels, int tile, Likeliest* out) {
    const Tiles own(want_tiles(head, x.rows));
    const int width = Tiling{x.rows}.width(tile);
    for (int t = 0; t < width; t++) out[t] = {};
    alignas(64) float sums[TILE * PANEL];
    for (int p = panels.begin; p < panels.end; p++) {
        const Panel& panel = head.panels[p];
        sum_panel(panel, head.cols, x, tile, sums);
        for (int t = 0; t < width; t++) {
            const float* logits = sums + t * PANEL;
            if (!any_above(load(logits), out[t].value)) continue;
            for (int r = 0; r < panel.rows; r++) out[t].add({logits[r], panel.first_row + r});
        }
    }
}

}  // namespace tercet
