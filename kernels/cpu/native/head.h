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

// Largest so far in each of a panel's lanes, for one row.
struct LaneMaxima {
    float value[PANEL];
    int32_t panel[PANEL];
    int32_t poisoned[PANEL];

    void clear() {
        for (int r = 0; r < PANEL; r++) {
            value[r] = -std::numeric_limits<float>::infinity();
            panel[r] = std::numeric_limits<int32_t>::max();
            poisoned[r] = 0;
        }
    }

    // Panels come in order, so that the first of equals stays.
    void add(const float* sums, int32_t index) {
        for (int r = 0; r < PANEL; r++) {
            const bool more = sums[r] > value[r];
            value[r] = more ? sums[r] : value[r];
            panel[r] = more ? index : panel[r];
            poisoned[r] |= sums[r] != sums[r];
        }
    }
};

// out [rows of the tile]: of the rows of the matrix in these panels.
inline void head_likeliest(const Matrix& head, const Activations& x, Range panels, int tile, Likeliest* out) {
    const int width = Tiling{x.rows}.width(tile);
    LaneMaxima maxima[TILE];
    for (int t = 0; t < width; t++) maxima[t].clear();
    alignas(64) float sums[TILE * PANEL];
    for (int p = panels.begin; p < panels.end; p++) {
        const Panel& panel = head.panels[p];
        sum_panel(panel, head.cols, x, tile, sums);
        for (int t = 0; t < width; t++) {
            for (int r = panel.rows; r < PANEL; r++) sums[t * PANEL + r] = -std::numeric_limits<float>::infinity();
            maxima[t].add(sums + t * PANEL, p);
        }
    }
    for (int t = 0; t < width; t++) {
        out[t] = {};
        for (int r = 0; r < PANEL; r++) {
            if (maxima[t].poisoned[r]) out[t].add({std::numeric_limits<float>::quiet_NaN(), 0});
            const int32_t panel = maxima[t].panel[r];
            if (panel < panels.end) out[t].add({maxima[t].value[r], head.panels[panel].first_row + r});
        }
    }
}

}  // namespace tercet
