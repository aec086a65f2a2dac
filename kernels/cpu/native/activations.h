// Rows of activations as the integer linear reads them: integers with a scale for every SPAN columns.
//
// Definition, the same bits in every instruction set. Of a span of columns of a row, m being the largest |x|, and L 127
// with one plane, 32,639 with two:
//   m < 2^-100          q = 0, scale = 0                   (2^-100 is beneath what a sum of weights can show)
//   an x is inf or NaN  q = 0, scale = NaN                 (so that all of the row's results are NaN)
//   otherwise           scale = m / L, q = x * (L / m) rounded to the nearest integer, ties to even
// each operation rounded once to float32. The largest |q| is L. A row's numbers depend on that row alone.
//
// Planes are signed bytes: one is q itself; two are upper and lower, q = 256 * upper + lower, lower in [-128, 127]. 32,639
// is the largest q whose upper byte is no more than 127. A group's dot product stays whole: at most 255 * 32,639 * 32 in
// size, 2.7e8, in 32 bits.
//
// Layout. Rows come in tiles of up to TILE rows, as equal as they can be (`Tiling`). Within a tile the groups of GROUP
// columns follow each other, within a group the tile's rows, and within a row its planes: what a kernel reads for one
// group of weights is adjacent. Columns are filled up with zeros to a whole group.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

#include "lanes.h"

namespace tercet {

constexpr int GROUP = 32;  // columns of one integer sum: a group of weights has a scale
constexpr int SPAN = 64;   // columns of a scale of activations
constexpr int TILE = 16;   // rows that a kernel computes together, at most
constexpr int MOST_PLANES = 2;  // of a row, at most

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Rows [0, rows) in tiles that differ by one row at most.
struct Tiling {
    int rows;

    int count() const { return ceil_div(rows, TILE); }
    int first(int tile) const { return static_cast<int>(int64_t{tile} * rows / count()); }
    int width(int tile) const { return first(tile + 1) - first(tile); }
    int tile_of(int row) const {
        int tile = static_cast<int>(int64_t{row} * count() / rows);
        while (first(tile + 1) <= row) tile++;
        return tile;
    }
};

// Of one tile, `width` rows. Group g of row t is at [g * width + t].
struct QuantizedTile {
    const int8_t* q;       // [groups][width][planes][GROUP]
    const int32_t* total;  // [groups][width], sum of q
    const int32_t* half;   // [groups][width], sum of the first 16 of q
    const float* scale;    // [spans][width]
    int width, planes;

    // The same without its first rows.
    QuantizedTile from(int row) const {
        return {q + int64_t{row} * planes * GROUP, total + row, half + row, scale + row, width, planes};
    }
};

struct QuantizedRows {
    int8_t* q;
    int32_t* total;
    int32_t* half;
    float* scale;
    int rows, cols;
    int planes;

    int groups() const { return ceil_div(cols, GROUP); }
    int spans() const { return ceil_div(cols, SPAN); }

    QuantizedTile tile(int index) const {
        const Tiling tiling{rows};
        const int64_t first = tiling.first(index);
        return {q + first * groups() * planes * GROUP, total + first * groups(), half + first * groups(),
                scale + first * spans(), tiling.width(index), planes};
    }

    // Where total, half, scale and q lie in one buffer, each aligned to 64 bytes; `bytes` is its size. In the room for
    // some planes fewer fit too. Behind q as many bytes may be read as a tile of one row and plane lacks (tiles.h).
    static int64_t bytes(int rows, int cols, int planes) {
        const int64_t groups = ceil_div(cols, GROUP), spans = ceil_div(cols, SPAN);
        return 2 * aligned(rows * groups * 4) + aligned(rows * spans * 4) + aligned(rows * groups * planes * GROUP) +
               TILE * GROUP;
    }
    static QuantizedRows in(void* buffer, int rows, int cols, int planes) {
        const int64_t groups = ceil_div(cols, GROUP), spans = ceil_div(cols, SPAN);
        auto* at = static_cast<uint8_t*>(buffer);
        QuantizedRows out{};
        out.rows = rows, out.cols = cols, out.planes = planes;
        out.total = reinterpret_cast<int32_t*>(at);
        out.half = reinterpret_cast<int32_t*>(at += aligned(rows * groups * 4));
        out.scale = reinterpret_cast<float*>(at += aligned(rows * groups * 4));
        out.q = reinterpret_cast<int8_t*>(at += aligned(rows * spans * 4));
        return out;
    }

private:
    static int64_t aligned(int64_t size) { return (size + 63) / 64 * 64; }
};

struct Rounding {
    float scale;    // of the span
    float inverse;  // what columns are multiplied with
};

inline Rounding rounding(float largest, bool finite, int planes) {
    if (!finite) return {std::numeric_limits<float>::quiet_NaN(), 0.0f};
    if (largest < 0x1p-100f) return {0.0f, 0.0f};
    const float integers = planes == 1 ? 127.0f : 32639.0f;
    return {largest / integers, integers / largest};
}

// A span's integers and what is summed of them, sixteen columns at a time.
struct RoundedSpan {
    alignas(64) int8_t q[MOST_PLANES][SPAN];
    int32_t sums[SPAN / 16];  // of both planes together
    float scale;
};

#if defined(TERCET_AVX512)

static_assert(SPAN == 64);

// Of columns [16 i, 16 i + 16) in lane 4 i.
inline __m512i sums_of_sixteen(__m512i q) {
    const __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), q);
    const __m512i pairs = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_BADC));
    return _mm512_add_epi32(pairs, _mm512_shuffle_epi32(pairs, _MM_PERM_CDAB));
}

inline __m512i lowest_bytes(const __m512i (&q)[4]) {
    const __m256i low = _mm256_set_m128i(_mm512_cvtepi32_epi8(q[1]), _mm512_cvtepi32_epi8(q[0]));
    const __m256i high = _mm256_set_m128i(_mm512_cvtepi32_epi8(q[3]), _mm512_cvtepi32_epi8(q[2]));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// x [cols], 1 <= cols <= SPAN; the columns that fill up are zeros.
inline void round_span(const float* x, int cols, int planes, RoundedSpan& out) {
    __m512 part[4];
    __m512i largest = _mm512_setzero_si512();  // bits of |x|, which are in the order of the numbers, NaN the largest
    for (int i = 0; i < 4; i++) {
        const int left = cols - i * LANES;
        part[i] = _mm512_maskz_loadu_ps(first_lanes(left < 0 ? 0 : left < LANES ? left : LANES), x + i * LANES);
        largest = _mm512_max_epu32(largest, _mm512_castps_si512(_mm512_abs_ps(part[i])));
    }
    const uint32_t bits = _mm512_reduce_max_epu32(largest);
    const Rounding by = rounding(std::bit_cast<float>(bits), bits < 0x7f800000u, planes);
    out.scale = by.scale;
    __m512i q[4] = {};
    if (by.inverse != 0.0f) {
        const __m512 inverse = _mm512_set1_ps(by.inverse);
        for (int i = 0; i < 4; i++) q[i] = _mm512_cvtps_epi32(_mm512_mul_ps(part[i], inverse));
    }
    const __m512i lower = lowest_bytes(q);
    __m512i sums = sums_of_sixteen(lower);
    if (planes == 1) {
        _mm512_store_si512(out.q[0], lower);
    } else {
        for (int i = 0; i < 4; i++) q[i] = _mm512_srai_epi32(_mm512_add_epi32(q[i], _mm512_set1_epi32(128)), 8);
        const __m512i upper = lowest_bytes(q);
        _mm512_store_si512(out.q[0], upper);
        _mm512_store_si512(out.q[1], lower);
        sums = _mm512_add_epi32(_mm512_slli_epi32(sums_of_sixteen(upper), 8), sums);
    }
    const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out.sums),
                     _mm512_castsi512_si128(_mm512_permutexvar_epi32(firsts, sums)));
}

#else

// x [cols], 1 <= cols <= SPAN; the columns that fill up are zeros.
inline void round_span(const float* x, int cols, int planes, RoundedSpan& out) {
    float whole[SPAN] = {};
    std::memcpy(whole, x, cols * sizeof(float));
    uint32_t largest = 0;  // bits of |x|, which are in the order of the numbers, NaN the largest
    for (const float value : whole) {
        const uint32_t bits = std::bit_cast<uint32_t>(value) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    const Rounding by = rounding(std::bit_cast<float>(largest), largest < 0x7f800000u, planes);
    out.scale = by.scale;
    for (int i = 0; i < SPAN / 16; i++) {
        Lanes rounded = all(0.0f);
        if (by.inverse != 0.0f) rounded = round_even(load(whole + 16 * i) * all(by.inverse));
        store(whole + 16 * i, rounded);
        out.sums[i] = 0;
        for (int c = 16 * i; c < 16 * (i + 1); c++) {
            const auto q = static_cast<int32_t>(whole[c]);
            out.sums[i] += q;
            if (planes == 2) out.q[0][c] = static_cast<int8_t>((q + 128) >> 8);
            out.q[planes - 1][c] = static_cast<int8_t>(q);  // modulo 256: C++20
        }
    }
}

#endif

// Columns [first, first + count) of a row; first is a multiple of SPAN, count too unless the columns end there.
// x points to column `first`.
inline void quantize_columns(const float* x, int first, int count, int row, const QuantizedRows& out) {
    const Tiling tiling{out.rows};
    const int tile = tiling.tile_of(row), width = tiling.width(tile), groups = out.groups();
    const int64_t start = tiling.first(tile), place = row - start;
    for (int c = 0; c < count; c += SPAN) {
        RoundedSpan span;
        round_span(x + c, count - c < SPAN ? count - c : SPAN, out.planes, span);
        out.scale[start * out.spans() + int64_t{(first + c) / SPAN} * width + place] = span.scale;
        const int group = (first + c) / GROUP;
        for (int i = 0; i < SPAN / GROUP && group + i < groups; i++) {
            const int64_t at = start * groups + int64_t{group + i} * width + place;
            for (int p = 0; p < out.planes; p++)
                std::memcpy(out.q + (at * out.planes + p) * GROUP, span.q[p] + i * GROUP, GROUP);
            out.half[at] = span.sums[2 * i];
            out.total[at] = span.sums[2 * i] + span.sums[2 * i + 1];
        }
    }
}

inline void quantize_row(const float* x, int row, const QuantizedRows& out) {
    quantize_columns(x, 0, out.cols, row, out);
}

}  // namespace tercet
