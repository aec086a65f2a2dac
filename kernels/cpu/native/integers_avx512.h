// Sums of one panel of integers with the rows of one tile: AVX-512 with VNNI. A register is 16 rows x 4 columns.
#pragma once

#include "panels.h"

namespace tercet {

// Bytes that are asked for before they are needed, into the second cache: farther than the CPU's own prefetching looks
// when a core reads slower than memory delivers. Measured: with 8 KB one thread reads 30 GB/s, with none 13.
constexpr int AHEAD = 8192;

template <int WIDTH>
constexpr int CHAINS = WIDTH == 1 ? 2 : 1;  // of integer sums of one group: more where few rows keep the CPU busy

inline __m512i four_columns(const int8_t* q) {
    int32_t four;
    std::memcpy(&four, q, 4);
    return _mm512_set1_epi32(four);
}

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

template <int FROM, int TO>
inline __m512i dot(const __m512i (&steps)[8], const int8_t* q) {
    __m512i sum = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int j = FROM; j < TO; j++) sum = _mm512_dpbusd_epi32(sum, steps[j], four_columns(q + 4 * j));
    return sum;
}

// sum + scale * (dot - OFFSET * total)
template <IntegerLayout L>
inline __m512 scaled(__m512i dot, __m512i total, __m512 scale, __m512 sum) {
    if constexpr (!L.affine) dot = _mm512_sub_epi32(dot, _mm512_slli_epi32(total, L.offset() == 8 ? 3 : 7));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, sum);
}

// What one group of one row adds to the sum of its span.
template <IntegerLayout L, int WIDTH>
inline __m512 add_group(const __m512i (&steps)[8], const QuantizedTile& x, int64_t at, const __m512 (&scale)[2],
                        __m512 minimum, __m512 sum) {
    const int8_t* q = x.q + at * GROUP;
    const __m512i total = _mm512_set1_epi32(x.total[at]);
    if constexpr (L.per == 16) {
        const __m512i half = _mm512_set1_epi32(x.half[at]);
        sum = scaled<L>(dot<0, 4>(steps, q), half, scale[0], sum);
        return scaled<L>(dot<4, 8>(steps, q), _mm512_sub_epi32(total, half), scale[1], sum);
    }
    const __m512i whole = CHAINS<WIDTH> == 1
                              ? dot<0, 8>(steps, q)
                              : _mm512_add_epi32(dot<0, 4>(steps, q), dot<4, 8>(steps, q));
    sum = scaled<L>(whole, total, scale[0], sum);
    if constexpr (L.affine) sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), minimum, sum);
    return sum;
}

// With a scale for a whole row, the sum of a span is one of integers.
template <IntegerLayout L, int WIDTH>
    requires(L.per == 0)
void add_up(const uint8_t* panel, int groups, const QuantizedTile& x, float* sums) {
    const uint8_t* at = panel + L.integers_at(groups);
    __m512 total[WIDTH];
#pragma GCC unroll 16
    for (int t = 0; t < WIDTH; t++) total[t] = _mm512_setzero_ps();
    for (int g = 0, span = 0; g < groups; span++) {
        __m512i part[WIDTH];
#pragma GCC unroll 16
        for (int t = 0; t < WIDTH; t++) part[t] = _mm512_setzero_si512();
        for (const int end = g + SPAN / GROUP < groups ? g + SPAN / GROUP : groups; g < end; g++) {
            for (int line = 0; line < L.group_bytes(); line += 64) _mm_prefetch(at + AHEAD + line, _MM_HINT_T1);
            __m512i steps[8];
            load_steps<L>(at, steps);
            at += L.group_bytes();
#pragma GCC unroll 16
            for (int t = 0; t < WIDTH; t++) {
                const int64_t place = int64_t{g} * x.width + t;
                const __m512i total_of = _mm512_set1_epi32(x.total[place]);
                const __m512i dots = _mm512_add_epi32(dot<0, 4>(steps, x.q + place * GROUP),
                                                      dot<4, 8>(steps, x.q + place * GROUP));
                part[t] = _mm512_add_epi32(part[t], _mm512_sub_epi32(dots, _mm512_slli_epi32(total_of, 7)));
            }
        }
#pragma GCC unroll 16
        for (int t = 0; t < WIDTH; t++)
            total[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(part[t]),
                                       _mm512_set1_ps(x.scale[int64_t{span} * x.width + t]), total[t]);
    }
    const __m512 scale = load_scale<L>(panel);
#pragma GCC unroll 16
    for (int t = 0; t < WIDTH; t++) _mm512_storeu_ps(sums + t * PANEL, _mm512_mul_ps(total[t], scale));
}

// sums [WIDTH][PANEL], of the tile's rows from x on.
template <IntegerLayout L, int WIDTH>
    requires(L.per != 0)
void add_up(const uint8_t* panel, int groups, const QuantizedTile& x, float* sums) {
    constexpr int SCALES = GROUP / L.per, STRIDE = PANEL * L.scale_bytes();
    constexpr int BYTES = L.group_bytes() + (SCALES + (L.affine ? 1 : 0)) * STRIDE;  // that a group adds to a panel
    const uint8_t* minimums = panel + L.minimums_at(groups);
    const uint8_t* integers = panel + L.integers_at(groups);
    const uint8_t* ahead = panel + AHEAD;
    __m512 total[WIDTH];
#pragma GCC unroll 16
    for (int t = 0; t < WIDTH; t++) total[t] = _mm512_setzero_ps();
    for (int g = 0, span = 0; g < groups; span++) {
        __m512 part[WIDTH];
#pragma GCC unroll 16
        for (int t = 0; t < WIDTH; t++) part[t] = _mm512_setzero_ps();
        for (const int end = g + SPAN / GROUP < groups ? g + SPAN / GROUP : groups; g < end; g++) {
            const uint8_t* at = integers + int64_t{g} * L.group_bytes();
            for (int line = 0; line < BYTES; line += 64) _mm_prefetch(ahead + line, _MM_HINT_T1);
            ahead += BYTES;
            __m512i steps[8];
            load_steps<L>(at, steps);
            __m512 scale[2], minimum = _mm512_setzero_ps();
            for (int i = 0; i < SCALES; i++) scale[i] = load_scale<L>(panel + (g * SCALES + i) * STRIDE);
            if constexpr (L.affine) minimum = load_scale<L>(minimums + g * STRIDE);
#pragma GCC unroll 16
            for (int t = 0; t < WIDTH; t++)
                part[t] = add_group<L, WIDTH>(steps, x, int64_t{g} * x.width + t, scale, minimum, part[t]);
        }
#pragma GCC unroll 16
        for (int t = 0; t < WIDTH; t++)
            total[t] = _mm512_fmadd_ps(part[t], _mm512_set1_ps(x.scale[int64_t{span} * x.width + t]), total[t]);
    }
#pragma GCC unroll 16
    for (int t = 0; t < WIDTH; t++) _mm512_storeu_ps(sums + t * PANEL, total[t]);
}

}  // namespace tercet
