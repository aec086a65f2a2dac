// Sums of one panel of integers with the rows of one tile, in plain C++. Also what the other two are to compute, but that
// they round a product and its addition once.
#pragma once

#include "half.h"
#include "panels.h"

namespace tercet {

template <IntegerLayout L>
inline float load_scale(const uint8_t* at) {
    if constexpr (L.halves) {
        uint16_t half;
        std::memcpy(&half, at, 2);
        return from_half(half);
    } else {
        float scale;
        std::memcpy(&scale, at, 4);
        return scale;
    }
}

// Columns [from, to) of a group, for each row of the panel. q: of one plane.
template <IntegerLayout L>
inline void dot_plane(const uint8_t* integers, const int8_t* q, int from, int to, int32_t (&sums)[PANEL]) {
    for (int r = 0; r < PANEL; r++) sums[r] = 0;
    for (int c = from; c < to; c++) {
        const int step = c / 4, place = c % 4;
        const uint8_t* at = integers + 64 * (L.nibbles ? step % 4 : step) + place;
        const int shift = L.nibbles && step >= 4 ? 4 : 0, mask = L.nibbles ? 15 : 255;
        for (int r = 0; r < PANEL; r++) sums[r] += (at[4 * r] >> shift & mask) * q[c];
    }
}

// q: of the planes of a row's group.
template <IntegerLayout L, int PLANES>
inline void dot(const uint8_t* integers, const int8_t* q, int from, int to, int32_t (&sums)[PANEL]) {
    dot_plane<L>(integers, q, from, to, sums);
    if constexpr (PLANES == 2) {
        int32_t lower[PANEL];
        dot_plane<L>(integers, q + GROUP, from, to, lower);
        for (int r = 0; r < PANEL; r++) sums[r] = sums[r] * 256 + lower[r];
    }
}

// With a scale for a whole row, the sum of a span is one of integers.
template <IntegerLayout L, int PLANES, int WIDTH>
    requires(L.per == 0)
void add_up(const uint8_t* panel, int groups, const QuantizedTile& x, float* sums) {
    const uint8_t* integers = panel + L.integers_at(groups);
    for (int t = 0; t < WIDTH; t++) {
        float total[PANEL] = {};
        for (int g = 0, span = 0; g < groups; span++) {
            int32_t part[PANEL] = {};
            for (const int end = g + SPAN / GROUP < groups ? g + SPAN / GROUP : groups; g < end; g++) {
                const int64_t at = int64_t{g} * x.width + t;
                int32_t sum[PANEL];
                dot<L, PLANES>(integers + int64_t{g} * L.group_bytes(), x.q + at * PLANES * GROUP, 0, GROUP, sum);
                for (int r = 0; r < PANEL; r++) part[r] += sum[r] - L.offset() * x.total[at];
            }
            const float by = x.scale[int64_t{span} * x.width + t];
            for (int r = 0; r < PANEL; r++) total[r] += static_cast<float>(part[r]) * by;
        }
        for (int r = 0; r < PANEL; r++)
            sums[t * PANEL + r] = total[r] * load_scale<L>(panel + r * L.scale_bytes());
    }
}

// sums [WIDTH][PANEL], of the tile's rows from x on.
template <IntegerLayout L, int PLANES, int WIDTH>
    requires(L.per != 0)
void add_up(const uint8_t* panel, int groups, const QuantizedTile& x, float* sums) {
    constexpr int SCALES = GROUP / L.per, SIZE = L.scale_bytes(), OFFSET = L.affine ? 0 : L.offset();
    const uint8_t* minimums = panel + L.minimums_at(groups);
    const uint8_t* integers = panel + L.integers_at(groups);
    for (int t = 0; t < WIDTH; t++) {
        float total[PANEL] = {};
        for (int g = 0, span = 0; g < groups; span++) {
            float part[PANEL] = {};
            for (const int end = g + SPAN / GROUP < groups ? g + SPAN / GROUP : groups; g < end; g++) {
                const int64_t at = int64_t{g} * x.width + t;
                const int32_t halves[2] = {x.half[at], x.total[at] - x.half[at]};
                for (int i = 0; i < SCALES; i++) {
                    int32_t sum[PANEL];
                    dot<L, PLANES>(integers + int64_t{g} * L.group_bytes(), x.q + at * PLANES * GROUP, i * L.per,
                                      (i + 1) * L.per, sum);
                    const int32_t shift = OFFSET * (SCALES == 1 ? x.total[at] : halves[i]);
                    for (int r = 0; r < PANEL; r++)
                        part[r] += static_cast<float>(sum[r] - shift) *
                                   load_scale<L>(panel + ((g * SCALES + i) * PANEL + r) * SIZE);
                }
                if constexpr (L.affine)
                    for (int r = 0; r < PANEL; r++)
                        part[r] += static_cast<float>(x.total[at]) * load_scale<L>(minimums + (g * PANEL + r) * SIZE);
            }
            for (int r = 0; r < PANEL; r++) total[r] += part[r] * x.scale[int64_t{span} * x.width + t];
        }
        for (int r = 0; r < PANEL; r++) sums[t * PANEL + r] = total[r];
    }
}

}  // namespace tercet
