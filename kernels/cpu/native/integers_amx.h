// Sums of one panel of integers with the rows of one tile: AMX for the products, AVX-512 for the rest (tiles.h).
//
// A unit of work is a span with the sixteen planes of a tile of activations: two products, one for each group, and then
// floats. The floats of a unit are made while the next one's products are. Both units' sums lie within 4 KB, for a load
// waits for a store that it takes, by its lowest 12 bits, for one to the same place.
#pragma once

#include "integers_avx512.h"
#include "tiles.h"

namespace tercet {

constexpr int TILED_PLANES = 16;  // of rows, in a tile
constexpr int SPAN_GROUPS = SPAN / GROUP;

// A span's weights as tiles read them, signed where that takes the offset away.
struct alignas(64) TiledWeights {
    uint8_t steps[SPAN_GROUPS][8 * 64];
};
// Whole sums of a unit: [group][plane of a row][row of the panel].
struct alignas(64) TiledSums {
    int32_t of[SPAN_GROUPS][TILED_PLANES * PANEL];
};

// Bytes with minimums are unsigned, and tiles read them in the panel.
template <IntegerLayout L>
constexpr bool read_in_place() {
    return !L.nibbles && L.affine;
}

// Unpacks groups [g, g + GROUPS) of a panel.
template <IntegerLayout L, int GROUPS>
__attribute__((always_inline)) inline void unpack_span(const uint8_t* panel, int groups, int g, TiledWeights& out) {
    const uint8_t* integers = panel + L.integers_at(groups) + int64_t{g} * L.group_bytes();
#pragma GCC unroll 2
    for (int i = 0; i < GROUPS; i++) {
        __m512i steps[8];
        load_steps<L>(integers + i * L.group_bytes(), steps);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            const __m512i offset = _mm512_set1_epi8(static_cast<char>(L.affine ? 0 : L.offset()));
            _mm512_store_si512(out.steps[i] + 64 * j, _mm512_sub_epi8(steps[j], offset));
        }
    }
}

// A span's weights to tiles 6 and 7. unpacked: of the same span.
template <IntegerLayout L, int GROUPS>
inline void load_weights(const uint8_t* panel, int groups, int g, const TiledWeights& unpacked) {
    const uint8_t* integers = panel + L.integers_at(groups) + int64_t{g} * L.group_bytes();
    _tile_loadd(6, read_in_place<L>() ? integers : unpacked.steps[0], 64);
    if constexpr (GROUPS == 2) _tile_loadd(7, read_in_place<L>() ? integers + L.group_bytes() : unpacked.steps[1], 64);
}

// As macros, for a tile's number is a part of the instruction's text.
#define TERCET_MULTIPLY(sums, planes, weights)       \
    do {                                             \
        if constexpr (read_in_place<L>())            \
            _tile_dpbsud(sums, planes, weights);     \
        else                                         \
            _tile_dpbssd(sums, planes, weights);     \
    } while (false)
#define TERCET_MULTIPLY_UNIT(first, second)                               \
    do {                                                                  \
        _tile_zero(first);                                                \
        _tile_loadd(4, q, GROUP);                                         \
        TERCET_MULTIPLY(first, 4, 6);                                     \
        if constexpr (GROUPS == 2) _tile_loadd(5, q + stride, GROUP);     \
        if constexpr (GROUPS == 2 && L.per == 0) {                        \
            TERCET_MULTIPLY(first, 5, 7);                                 \
        } else if constexpr (GROUPS == 2) {                               \
            _tile_zero(second);                                           \
            TERCET_MULTIPLY(second, 5, 7);                                \
            _tile_stored(second, out.of[1], 64);                          \
        }                                                                 \
        _tile_stored(first, out.of[0], 64);                               \
    } while (false)

// A unit's sums, of the weights in tiles 6 and 7. q: of its planes' first group, the second one's `stride` further.
// Where weights have a scale for a whole row, the sums of a span are one. ODD: with other tiles than the unit before.
template <IntegerLayout L, int GROUPS, bool ODD>
inline void multiply_unit(const int8_t* q, int64_t stride, TiledSums& out) {
    if constexpr (ODD)
        TERCET_MULTIPLY_UNIT(2, 3);
    else
        TERCET_MULTIPLY_UNIT(0, 1);
}
#undef TERCET_MULTIPLY_UNIT
#undef TERCET_MULTIPLY

template <int PLANES>
inline __m512i whole_sum(const int32_t* of, int row) {
    const int32_t* at = of + row * PLANES * PANEL;
    if constexpr (PLANES == 1) return _mm512_load_si512(at);
    return _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(at), 8), _mm512_load_si512(at + PANEL));
}

// As add_rows of integers_avx512.h, of sums that are whole and centred: rows [begin, end) of the tile, a unit's.
template <IntegerLayout L, int PLANES, int GROUPS>
__attribute__((always_inline)) inline void add_unit(const uint8_t* panel, int groups, int g, const QuantizedTile& x,
                                                    int begin, int end, const TiledSums& whole, float* sums) {
    constexpr int STRIDE = PANEL * L.scale_bytes();
    __m512 scale[GROUPS], minimum[GROUPS];
    alignas(64) float total[GROUPS][TILE];
#pragma GCC unroll 2
    for (int i = 0; i < GROUPS; i++) {
        if constexpr (L.per != 0) scale[i] = load_scale<L>(panel + (g + i) * STRIDE);
        if constexpr (L.affine) {
            minimum[i] = load_scale<L>(panel + L.minimums_at(groups) + (g + i) * STRIDE);
            const __m512i totals =
                _mm512_maskz_loadu_epi32(first_lanes(end - begin), x.total + int64_t{g + i} * x.width + begin);
            _mm512_store_ps(total[i], _mm512_cvtepi32_ps(totals));
        }
    }
    const float* scales = x.scale + int64_t{g} / SPAN_GROUPS * x.width + begin;
    float* at_row = sums + begin * PANEL;
#pragma GCC unroll 4
    for (int r = 0; r < end - begin; r++, at_row += PANEL) {
        __m512 sum = _mm512_setzero_ps();
        if constexpr (L.per == 0) {
            sum = _mm512_cvtepi32_ps(whole_sum<PLANES>(whole.of[0], r));
        } else {
#pragma GCC unroll 2
            for (int i = 0; i < GROUPS; i++) {
                sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole_sum<PLANES>(whole.of[i], r)), scale[i], sum);
                if constexpr (L.affine) sum = _mm512_fmadd_ps(_mm512_set1_ps(total[i][r]), minimum[i], sum);
            }
        }
        _mm512_storeu_ps(at_row, _mm512_fmadd_ps(sum, _mm512_set1_ps(scales[r]), _mm512_loadu_ps(at_row)));
    }
}

// sums [x.width][PANEL]. WIDE: the rows have more planes than a tile, and a span is two units.
template <IntegerLayout L, int PLANES, bool WIDE>
void add_up_tiles(const uint8_t* panel, int groups, const QuantizedTile& x, float* sums) {
    constexpr int STRIDE = PANEL * L.scale_bytes(), SCALES = L.per ? 1 + (L.affine ? 1 : 0) : 0;
    constexpr int BYTES = SPAN_GROUPS * (L.group_bytes() + SCALES * STRIDE);  // that a span adds to a panel
    const int pairs = groups / SPAN_GROUPS, rest = pairs * SPAN_GROUPS;
    const int64_t stride = int64_t{x.width} * PLANES * GROUP;
    const int middle = WIDE ? TILED_PLANES / PLANES : x.width;
    TiledWeights weights[2];
    alignas(4096) TiledSums whole[2];
    const uint8_t* ahead = panel + AHEAD;
    for (int t = 0; t < x.width; t++) _mm512_storeu_ps(sums + t * PANEL, _mm512_setzero_ps());
    const auto unpack = [&](int g) {
        if constexpr (read_in_place<L>()) return;
        TiledWeights& out = weights[g / SPAN_GROUPS % 2];
        if (g < rest)
            unpack_span<L, 2>(panel, groups, g, out);
        else if (g < groups)
            unpack_span<L, 1>(panel, groups, g, out);
    };
    // The last unit of the span before g, which has two groups.
    const auto add_last = [&](int g) {
        add_unit<L, PLANES, 2>(panel, groups, g - SPAN_GROUPS, x, WIDE ? middle : 0, x.width,
                               whole[WIDE ? 1 : g / SPAN_GROUPS % 2 ^ 1], sums);
    };
    unpack(0);
    for (int g = 0; g < rest; g += SPAN_GROUPS, ahead += BYTES) {
        for (int line = 0; line < BYTES; line += 64) _mm_prefetch(ahead + line, _MM_HINT_T1);
        const int8_t* q = x.q + g * stride;
        load_weights<L, 2>(panel, groups, g, weights[g / SPAN_GROUPS % 2]);
        unpack(g + SPAN_GROUPS);
        multiply_unit<L, 2, false>(q, stride, whole[WIDE ? 0 : g / SPAN_GROUPS % 2]);
        if (g) add_last(g);
        if constexpr (WIDE) {
            multiply_unit<L, 2, true>(q + TILED_PLANES * GROUP, stride, whole[1]);
            add_unit<L, PLANES, 2>(panel, groups, g, x, 0, middle, whole[0], sums);
        }
    }
    if (rest) add_last(rest);
    if (rest < groups) {
        const int8_t* q = x.q + rest * stride;
        load_weights<L, 1>(panel, groups, rest, weights[rest / SPAN_GROUPS % 2]);
        multiply_unit<L, 1, false>(q, stride, whole[0]);
        if constexpr (WIDE) multiply_unit<L, 1, true>(q + TILED_PLANES * GROUP, stride, whole[1]);
        add_unit<L, PLANES, 1>(panel, groups, rest, x, 0, middle, whole[0], sums);
        if constexpr (WIDE) add_unit<L, PLANES, 1>(panel, groups, rest, x, middle, x.width, whole[1], sums);
    }
    if constexpr (L.per == 0)
        for (int t = 0; t < x.width; t++)
            _mm512_storeu_ps(sums + t * PANEL, _mm512_mul_ps(_mm512_loadu_ps(sums + t * PANEL), load_scale<L>(panel)));
}

}  // namespace tercet
