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

// q: of one plane.
template <int FROM, int TO>
inline __m512i dot_plane(const __m512i (&steps)[8], const int8_t* q, __m512i sum) {
#pragma GCC unroll 8
    for (int j = FROM; j < TO; j++) sum = add_products(sum, steps[j], q + 4 * j);
    return sum;
}

// Steps [FROM, TO) with a row's group of columns, q its planes. Of the upper plane the lower one is a continuation: one
// instruction more. FEW: few rows keep the CPU busy, so each plane has a chain of its own.
template <int PLANES, bool FEW, int FROM, int TO>
inline __m512i dot(const __m512i (&steps)[8], const int8_t* q) {
    const __m512i zero = _mm512_setzero_si512();
    if constexpr (PLANES == 2) {
        const __m512i upper = _mm512_slli_epi32(dot_plane<FROM, TO>(steps, q, zero), 8);
        if constexpr (FEW) return _mm512_add_epi32(upper, dot_plane<FROM, TO>(steps, q + GROUP, zero));
        return dot_plane<FROM, TO>(steps, q + GROUP, upper);
    }
    constexpr int HALF = (FROM + TO) / 2;
    if constexpr (FEW)
        return _mm512_add_epi32(dot_plane<FROM, HALF>(steps, q, zero), dot_plane<HALF, TO>(steps, q, zero));
    return dot_plane<FROM, TO>(steps, q, zero);
}

// dot - OFFSET * total
template <IntegerLayout L>
inline __m512i centred(__m512i dot, __m512i total) {
    if constexpr (L.affine) return dot;
    return _mm512_sub_epi32(dot, _mm512_slli_epi32(total, L.offset() == 8 ? 3 : 7));
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

// What one group of one row adds to the sum of its span.
template <IntegerLayout L, int PLANES, bool FEW>
inline __m512 add_group(const GroupWeights& w, const QuantizedTile& x, int64_t at, __m512 sum) {
    const int8_t* q = x.q + at * PLANES * GROUP;
    const __m512i total = _mm512_set1_epi32(x.total[at]);
    if constexpr (L.per == 16) {
        const __m512i half = _mm512_set1_epi32(x.half[at]);
        const __m512i first = centred<L>(dot<PLANES, FEW, 0, 4>(w.steps, q), half);
        const __m512i second = centred<L>(dot<PLANES, FEW, 4, 8>(w.steps, q), _mm512_sub_epi32(total, half));
        sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(first), w.scale[0], sum);
        return _mm512_fmadd_ps(_mm512_cvtepi32_ps(second), w.scale[1], sum);
    }
    const __m512i whole = centred<L>(dot<PLANES, FEW, 0, 8>(w.steps, q), total);
    sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), w.scale[0], sum);
    if constexpr (L.affine) sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), w.minimum, sum);
    return sum;
}

// The sum of a span of one row, but for the row's scale. With a scale for a whole row of weights it is one of integers.
template <IntegerLayout L, int PLANES, int GROUPS, bool FEW>
inline __m512 span_sum(const GroupWeights (&w)[2], const QuantizedTile& x, int64_t at) {
    if constexpr (L.per == 0) {
        __m512i dots = _mm512_setzero_si512();
        int32_t total = 0;
#pragma GCC unroll 2
        for (int i = 0; i < GROUPS; i++) {
            const int64_t place = at + i * x.width;
            dots = _mm512_add_epi32(dots, dot<PLANES, FEW, 0, 8>(w[i].steps, x.q + place * PLANES * GROUP));
            total += x.total[place];
        }
        return _mm512_cvtepi32_ps(centred<L>(dots, _mm512_set1_epi32(total)));
    }
    __m512 sum = _mm512_setzero_ps();
#pragma GCC unroll 2
    for (int i = 0; i < GROUPS; i++) sum = add_group<L, PLANES, FEW>(w[i], x, at + i * x.width, sum);
    return sum;
}

// All rows with the weights of a span, which stay in registers, and so do the rows' totals if they are 8 at most.
template <IntegerLayout L, int PLANES, int WIDTH, int GROUPS>
__attribute__((always_inline)) inline void add_span(const uint8_t* panel, int groups, int g, const QuantizedTile& x, __m512 (&totals)[WIDTH]) {
    constexpr bool FEW = WIDTH == 1;
    GroupWeights w[2];
#pragma GCC unroll 2
    for (int i = 0; i < GROUPS; i++) load_group<L>(panel, groups, g + i, w[i]);
    const float* scales = x.scale + int64_t{g} / (SPAN / GROUP) * x.width;
#pragma GCC unroll 16
    for (int t = 0; t < WIDTH; t++)
        totals[t] = _mm512_fmadd_ps(span_sum<L, PLANES, GROUPS, FEW>(w, x, int64_t{g} * x.width + t),
                                    _mm512_set1_ps(scales[t]), totals[t]);
}

// sums [WIDTH][PANEL], of the tile's rows from x on.
template <IntegerLayout L, int PLANES, int WIDTH>
void add_up(const uint8_t* panel, int groups, const QuantizedTile& x, float* sums) {
    static_assert(SPAN == 2 * GROUP);
    constexpr int STRIDE = PANEL * L.scale_bytes();
    constexpr int SCALES = L.per ? GROUP / L.per + (L.affine ? 1 : 0) : 0;
    constexpr int BYTES = 2 * (L.group_bytes() + SCALES * STRIDE);  // that a span adds to a panel
    const uint8_t* ahead = panel + AHEAD;
    __m512 totals[WIDTH];
#pragma GCC unroll 16
    for (int t = 0; t < WIDTH; t++) totals[t] = _mm512_setzero_ps();
    int g = 0;
    for (; g + 2 <= groups; g += 2, ahead += BYTES) {
        for (int line = 0; line < BYTES; line += 64) _mm_prefetch(ahead + line, _MM_HINT_T1);
        add_span<L, PLANES, WIDTH, 2>(panel, groups, g, x, totals);
    }
    if (g < groups) add_span<L, PLANES, WIDTH, 1>(panel, groups, g, x, totals);
#pragma GCC unroll 16
    for (int t = 0; t < WIDTH; t++) {
        if constexpr (L.per == 0) totals[t] = _mm512_mul_ps(totals[t], load_scale<L>(panel));
        _mm512_storeu_ps(sums + t * PANEL, totals[t]);
    }
}

}  // namespace tercet
