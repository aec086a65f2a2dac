// Sums of one panel of integers with the rows of one tile: AVX2. A register is 8 rows x 4 columns.
//
// vpmaddubsw adds pairs of products in 16 bits. Of 4-bit weights even 8 steps fit there: 8 * 2 * 15 * 128 = 30,720. A
// byte is taken as two such halves.
#pragma once

#include "panels.h"

namespace tercet {

inline __m256i four_columns(const int8_t* q) {
    int32_t four;
    std::memcpy(&four, q, 4);
    return _mm256_set1_epi32(four);
}

template <IntegerLayout L>
inline __m256 load_scale(const uint8_t* at) {
    if constexpr (L.halves)
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    else
        return _mm256_loadu_ps(reinterpret_cast<const float*>(at));
}

inline __m256i load_step(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
inline __m256i lower(__m256i bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
inline __m256i upper(__m256i bytes) { return lower(_mm256_srli_epi16(bytes, 4)); }

// Columns [16 part, 16 part + 16) of a group. q: of one plane.
template <IntegerLayout L>
inline __m256i dot_plane(const uint8_t* integers, int part, const int8_t* q) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i low = _mm256_setzero_si256(), high = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const __m256i columns = four_columns(q + 16 * part + 4 * j);
        if constexpr (L.nibbles) {
            const __m256i both = load_step(integers + 64 * j);
            low = _mm256_add_epi16(low, _mm256_maddubs_epi16(part ? upper(both) : lower(both), columns));
        } else {
            const __m256i bytes = load_step(integers + 64 * (4 * part + j));
            low = _mm256_add_epi16(low, _mm256_maddubs_epi16(lower(bytes), columns));
            high = _mm256_add_epi16(high, _mm256_maddubs_epi16(upper(bytes), columns));
        }
    }
    const __m256i sum = _mm256_madd_epi16(low, ones);
    if constexpr (L.nibbles) return sum;
    return _mm256_add_epi32(sum, _mm256_slli_epi32(_mm256_madd_epi16(high, ones), 4));
}

// q: of the planes of a row's group.
template <IntegerLayout L, int PLANES>
inline __m256i dot(const uint8_t* integers, int part, const int8_t* q) {
    const __m256i first = dot_plane<L>(integers, part, q);
    if constexpr (PLANES == 1) return first;
    return _mm256_add_epi32(_mm256_slli_epi32(first, 8), dot_plane<L>(integers, part, q + GROUP));
}

// sum + scale * (dot - OFFSET * total)
template <IntegerLayout L>
inline __m256 scaled(__m256i dot, int32_t total, __m256 scale, __m256 sum) {
    if constexpr (!L.affine) dot = _mm256_sub_epi32(dot, _mm256_set1_epi32(L.offset() * total));
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, sum);
}

// With a scale for a whole row, the sum of a span is one of integers.
template <IntegerLayout L, int PLANES, int WIDTH>
    requires(L.per == 0)
inline void add_up_half(const uint8_t* panel, int lane, int groups, const QuantizedTile& x, float* sums) {
    const uint8_t* integers = panel + L.integers_at(groups) + lane * 4;
    const __m256 scale = load_scale<L>(panel + lane * L.scale_bytes());
    for (int t = 0; t < WIDTH; t++) {
        __m256 total = _mm256_setzero_ps();
        for (int g = 0, span = 0; g < groups; span++) {
            __m256i part = _mm256_setzero_si256();
            for (const int end = g + SPAN / GROUP < groups ? g + SPAN / GROUP : groups; g < end; g++) {
                const uint8_t* steps = integers + int64_t{g} * L.group_bytes();
                const int64_t at = int64_t{g} * x.width + t;
                const int8_t* q = x.q + at * PLANES * GROUP;
                part = _mm256_add_epi32(part, dot<L, PLANES>(steps, 0, q));
                part = _mm256_add_epi32(part, dot<L, PLANES>(steps, 1, q));
                part = _mm256_sub_epi32(part, _mm256_set1_epi32(L.offset() * x.total[at]));
            }
            const __m256 by = _mm256_set1_ps(x.scale[int64_t{span} * x.width + t]);
            total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(part), by, total);
        }
        _mm256_storeu_ps(sums + t * PANEL + lane, _mm256_mul_ps(total, scale));
    }
}

// sums [WIDTH][PANEL], of the tile's rows from x on; here its lanes from `lane` on.
template <IntegerLayout L, int PLANES, int WIDTH>
    requires(L.per != 0)
inline void add_up_half(const uint8_t* panel, int lane, int groups, const QuantizedTile& x, float* sums) {
    constexpr int SCALES = GROUP / L.per, STRIDE = PANEL * L.scale_bytes();
    const uint8_t* scales = panel + lane * L.scale_bytes();
    const uint8_t* minimums = scales + L.minimums_at(groups);
    const uint8_t* integers = panel + L.integers_at(groups) + lane * 4;
    __m256 total[WIDTH];
    for (int t = 0; t < WIDTH; t++) total[t] = _mm256_setzero_ps();
    for (int g = 0, span = 0; g < groups; span++) {
        __m256 part[WIDTH];
        for (int t = 0; t < WIDTH; t++) part[t] = _mm256_setzero_ps();
        for (const int end = g + SPAN / GROUP < groups ? g + SPAN / GROUP : groups; g < end; g++) {
            const uint8_t* steps = integers + int64_t{g} * L.group_bytes();
            __m256 scale[2], minimum = _mm256_setzero_ps();
            for (int i = 0; i < SCALES; i++) scale[i] = load_scale<L>(scales + (g * SCALES + i) * STRIDE);
            if constexpr (L.affine) minimum = load_scale<L>(minimums + g * STRIDE);
#pragma GCC unroll 4
            for (int t = 0; t < WIDTH; t++) {
                const int64_t at = int64_t{g} * x.width + t;
                const int8_t* q = x.q + at * PLANES * GROUP;
                const __m256i first = dot<L, PLANES>(steps, 0, q);
                const __m256i second = dot<L, PLANES>(steps, 1, q);
                if constexpr (L.per == 16) {
                    part[t] = scaled<L>(first, x.half[at], scale[0], part[t]);
                    part[t] = scaled<L>(second, x.total[at] - x.half[at], scale[1], part[t]);
                } else {
                    part[t] = scaled<L>(_mm256_add_epi32(first, second), x.total[at], scale[0], part[t]);
                }
                if constexpr (L.affine)
                    part[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_set1_epi32(x.total[at])), minimum, part[t]);
            }
        }
        for (int t = 0; t < WIDTH; t++)
            total[t] = _mm256_fmadd_ps(part[t], _mm256_set1_ps(x.scale[int64_t{span} * x.width + t]), total[t]);
    }
    for (int t = 0; t < WIDTH; t++) _mm256_storeu_ps(sums + t * PANEL + lane, total[t]);
}

template <IntegerLayout L, int PLANES, int WIDTH>
void add_up(const uint8_t* panel, int groups, const QuantizedTile& x, float* sums) {
    add_up_half<L, PLANES, WIDTH>(panel, 0, groups, x, sums);
    add_up_half<L, PLANES, WIDTH>(panel, PANEL / 2, groups, x, sums);
}

}  // namespace tercet
