// Sums of one panel of integers with the rows of one tile: AVX-512 with VNNI. A register is 16 rows x 4 columns.
#pragma once

#include "panels.h"

namespace tercet {

// Bytes that are asked for before they are needed, into the second cache: farther than the CPU's own prefetching looks
// when a core reads slower than memory delivers. Measured: with 8 KB one thread reads 30 GB/s, with none 13.
constexpr int AHEAD = 8192;

template <IntegerLayout L>
inline __m512 load_scale(const uint8_t* at) {
    if constexpr (L.halves)
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
    else
        return _mm512_loadu_ps(at);
}

// The 8 steps of a group.
template <IntegerLayout L>
inline void load_steps(const uint8_t* integers, __m512i (&steps)[8]) {
    if constexpr (L.nibbles) {
        const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const __m512i both = _mm512_loadu_si512(integers + 64 * j);
            steps[j] = _mm512_and_si512(both, low);
            steps[j + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        }
    } else {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) steps[j] = _mm512_loadu_si512(integers + 64 * j);
    }
}

// sum + step times the four columns at q. As the intrinsic would, but that g++ loads the columns by an instruction of
// their own.
inline __m512i add_products(__m512i sum, __m512i step, const int8_t* q) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(step), "m"(*reinterpret_cast<const int8_t(*)[4]>(q)));
    return sum;
}

// A group of a panel's weights in registers.
struct GroupWeights {
    __m512i steps[8];
    __m512 scale[2], minimum;
};

template <IntegerLayout L>
inline void load_group(const uint8_t* panel, int groups, int g, GroupWeights& out) {
    constexpr int SCALES = L.per ? GROUP / L.per : 0, STRIDE = PANEL * L.scale_bytes();
    load_steps<L>(panel + L.integers_at(groups) + int64_t{g} * L.group_bytes(), out.steps);
    for (int i = 0; i < SCALES; i++) out.scale[i] = load_scale<L>(panel + (g * SCALES + i) * STRIDE);
    if constexpr (L.affine) out.minimum = load_scale<L>(panel + L.minimums_at(groups) + g * STRIDE);
}

// dot - OFFSET * total
template <IntegerLayout L>
inline __m512i centred(__m512i dot, __m512i total) {
    if constexpr (L.affine) return dot;
    return _mm512_sub_epi32(dot, _mm512_slli_epi32(total, L.offset() == 8 ? 3 : 7));
}

// Steps [FROM, TO) of some groups with some rows, whose first group and row is at q. A product is added up in turn to each
// of at least four sums: a CPU looks ahead only so far, and an addition has to wait for the one before it to its sum.
// The dot product with the lower plane is added up on top of 256 times the upper one's. One row alone has two sums for
// each group instead: one for each plane, or of one plane for even and odd steps.
template <int PLANES, int GROUPS, int ROWS, int FROM, int TO>
__attribute__((always_inline)) inline void dots(const GroupWeights (&w)[2], const int8_t* q, int64_t group_stride,
                                                __m512i (&out)[ROWS][GROUPS]) {
    constexpr int ROW = PLANES * GROUP, CHAINS = ROWS == 1 ? 2 : 1;
    __m512i sums[ROWS][GROUPS][CHAINS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int i = 0; i < GROUPS; i++)
#pragma GCC unroll 2
            for (int c = 0; c < CHAINS; c++) sums[r][i][c] = _mm512_setzero_si512();
#pragma GCC unroll 2
    for (int p = 0; p < PLANES; p++) {
#pragma GCC unroll 8
        for (int j = FROM; j < TO; j++)
#pragma GCC unroll 2
            for (int i = 0; i < GROUPS; i++)
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; r++) {
                    __m512i& sum = sums[r][i][CHAINS == 1 ? 0 : PLANES == 1 ? j % 2 : p];
                    sum = add_products(sum, w[i].steps[j], q + i * group_stride + r * ROW + p * GROUP + 4 * j);
                }
        if (p + 1 == PLANES) break;
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int i = 0; i < GROUPS; i++) sums[r][i][0] = _mm512_slli_epi32(sums[r][i][0], 8);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int i = 0; i < GROUPS; i++)
            out[r][i] = CHAINS == 1 ? sums[r][i][0] : _mm512_add_epi32(sums[r][i][0], sums[r][i][CHAINS - 1]);
}

// Adds a span to the sums of ROWS rows, the first of which has its group at `at`. With a scale for a whole row of
// weights, the sum of a span is one of integers.
template <IntegerLayout L, int PLANES, int GROUPS, int ROWS>
__attribute__((always_inline)) inline void add_rows(const GroupWeights (&w)[2], const QuantizedTile& x, int64_t at,
                                                    const float* scales, float* sums) {
    const int8_t* q = x.q + at * PLANES * GROUP;
    const int64_t stride = int64_t{x.width} * PLANES * GROUP;
    __m512i whole[ROWS][GROUPS], second[ROWS][GROUPS];
    if constexpr (L.per == 16) {
        dots<PLANES, GROUPS, ROWS, 0, 4>(w, q, stride, whole);
        dots<PLANES, GROUPS, ROWS, 4, 8>(w, q, stride, second);
    } else {
        dots<PLANES, GROUPS, ROWS, 0, 8>(w, q, stride, whole);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
        __m512 sum = _mm512_setzero_ps();
        __m512i integers = _mm512_setzero_si512();
#pragma GCC unroll 2
        for (int i = 0; i < GROUPS; i++) {
            const int64_t place = at + r + i * int64_t{x.width};
            const __m512i total = _mm512_set1_epi32(x.total[place]);
            if constexpr (L.per == 0) {
                integers = _mm512_add_epi32(integers, centred<L>(whole[r][i], total));
            } else if constexpr (L.per == 16) {
                const __m512i half = _mm512_set1_epi32(x.half[place]);
                const __m512i rest = _mm512_sub_epi32(total, half);
                sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(centred<L>(whole[r][i], half)), w[i].scale[0], sum);
                sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(centred<L>(second[r][i], rest)), w[i].scale[1], sum);
            } else {
                sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(centred<L>(whole[r][i], total)), w[i].scale[0], sum);
                if constexpr (L.affine) sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), w[i].minimum, sum);
            }
        }
        if constexpr (L.per == 0) sum = _mm512_cvtepi32_ps(integers);
        float* at_row = sums + r * PANEL;
        _mm512_storeu_ps(at_row, _mm512_fmadd_ps(sum, _mm512_set1_ps(scales[r]), _mm512_loadu_ps(at_row)));
    }
}

// All rows with the weights of a span, which stay in registers.
template <IntegerLayout L, int PLANES, int GROUPS>
__attribute__((always_inline)) inline void add_span(const uint8_t* panel, int groups, int g, const QuantizedTile& x,
                                                    int rows, float* sums) {
    GroupWeights w[2];
#pragma GCC unroll 2
    for (int i = 0; i < GROUPS; i++) load_group<L>(panel, groups, g + i, w[i]);
    const float* scales = x.scale + int64_t{g} / (SPAN / GROUP) * x.width;
    const int64_t at = int64_t{g} * x.width;
    int t = 0;
    for (; t + 4 <= rows; t += 4) add_rows<L, PLANES, GROUPS, 4>(w, x, at + t, scales + t, sums + t * PANEL);
    if (rows - t == 1) add_rows<L, PLANES, GROUPS, 1>(w, x, at + t, scales + t, sums + t * PANEL);
    if (rows - t == 2) add_rows<L, PLANES, GROUPS, 2>(w, x, at + t, scales + t, sums + t * PANEL);
    if (rows - t == 3) add_rows<L, PLANES, GROUPS, 3>(w, x, at + t, scales + t, sums + t * PANEL);
}

// sums [rows][PANEL], of the tile's rows from x on.
template <IntegerLayout L, int PLANES>
void add_up_rows(const uint8_t* panel, int groups, const QuantizedTile& x, int rows, float* sums) {
    static_assert(SPAN == 2 * GROUP);
    constexpr int STRIDE = PANEL * L.scale_bytes();
    constexpr int SCALES = L.per ? GROUP / L.per + (L.affine ? 1 : 0) : 0;
    constexpr int BYTES = 2 * (L.group_bytes() + SCALES * STRIDE);  // that a span adds to a panel
    const uint8_t* ahead = panel + AHEAD;
    for (int t = 0; t < rows; t++) _mm512_storeu_ps(sums + t * PANEL, _mm512_setzero_ps());
    int g = 0;
    for (; g + 2 <= groups; g += 2, ahead += BYTES) {
        for (int line = 0; line < BYTES; line += 64) _mm_prefetch(ahead + line, _MM_HINT_T1);
        add_span<L, PLANES, 2>(panel, groups, g, x, rows, sums);
    }
    if (g < groups) add_span<L, PLANES, 1>(panel, groups, g, x, rows, sums);
    if constexpr (L.per == 0)
        for (int t = 0; t < rows; t++)
            _mm512_storeu_ps(sums + t * PANEL, _mm512_mul_ps(_mm512_loadu_ps(sums + t * PANEL), load_scale<L>(panel)));
}

template <IntegerLayout L, int PLANES, int WIDTH>
void add_up(const uint8_t* panel, int groups, const QuantizedTile& x, float* sums) {
    add_up_rows<L, PLANES>(panel, groups, x, WIDTH, sums);
}

}  // namespace tercet
