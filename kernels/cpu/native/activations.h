// Rows of activations as the integer linear reads them: signed bytes with a scale for every SPAN columns.
//
// Definition, the same bits in every instruction set. Of a span of columns of a row, m being the largest |x|:
//   m < 2^-100          q = 0, scale = 0                   (2^-100 is beneath what a sum of weights can show)
//   an x is inf or NaN  q = 0, scale = NaN                 (so that all of the row's results are NaN)
//   otherwise           scale = m / 127, q = x * (127 / m) rounded to the nearest integer, ties to even
// each operation rounded once to float32. The largest |q| is 127. A row's numbers depend on that row alone.
//
// Layout. Rows come in tiles of up to TILE rows, as equal as they can be (`Tiling`). Within a tile the groups of GROUP
// columns follow each other, and within a group the tile's rows: what a kernel reads for one group of weights is
// adjacent. Columns are filled up with zeros to a whole group.
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
    const int8_t* q;       // [groups][width][GROUP]
    const int32_t* total;  // [groups][width], sum of q
    const int32_t* half;   // [groups][width], sum of the first 16 of q
    const float* scale;    // [spans][width]
    int width;
};

struct QuantizedRows {
    int8_t* q;
    int32_t* total;
    int32_t* half;
    float* scale;
    int rows, cols;

    int groups() const { return ceil_div(cols, GROUP); }
    int spans() const { return ceil_div(cols, SPAN); }

    QuantizedTile tile(int index) const {
        const Tiling tiling{rows};
        const int64_t first = tiling.first(index);
        return {q + first * groups() * GROUP, total + first * groups(), half + first * groups(),
                scale + first * spans(), tiling.width(index)};
    }

    // Where q, total, half and scale lie in one buffer, each aligned to 64 bytes; `bytes` is its size.
    static int64_t bytes(int rows, int cols) {
        const int64_t groups = ceil_div(cols, GROUP), spans = ceil_div(cols, SPAN);
        return aligned(rows * groups * GROUP) + 2 * aligned(rows * groups * 4) + aligned(rows * spans * 4);
    }
    static QuantizedRows in(void* buffer, int rows, int cols) {
        const int64_t groups = ceil_div(cols, GROUP);
        auto* at = static_cast<uint8_t*>(buffer);
        QuantizedRows out{};
        out.rows = rows, out.cols = cols;
        out.q = reinterpret_cast<int8_t*>(at);
        out.total = reinterpret_cast<int32_t*>(at += aligned(rows * groups * GROUP));
        out.half = reinterpret_cast<int32_t*>(at += aligned(rows * groups * 4));
        out.scale = reinterpret_cast<float*>(at += aligned(rows * groups * 4));
        return out;
    }

private:
    static int64_t aligned(int64_t size) { return (size + 63) / 64 * 64; }
};

struct Rounding {
    float scale;    // of the span
    float inverse;  // what columns are multiplied with
};

inline Rounding rounding(float largest, bool finite) {
    if (!finite) return {std::numeric_limits<float>::quiet_NaN(), 0.0f};
    if (largest < 0x1p-100f) return {0.0f, 0.0f};
    return {largest / 127.0f, 127.0f / largest};
}

struct Totals {
    int32_t total, half;
};

#if defined(TERCET_AVX512)

// |x| <= 127.5 in every lane.
inline Totals round_group(Lanes low, Lanes high, int8_t* q) {
    const __m512i a = _mm512_cvtps_epi32(low.v), b = _mm512_cvtps_epi32(high.v);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q), _mm512_cvtepi32_epi8(a));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16), _mm512_cvtepi32_epi8(b));
    const int32_t half = _mm512_reduce_add_epi32(a);
    return {half + _mm512_reduce_add_epi32(b), half};
}

#else

inline Totals round_group(Lanes low, Lanes high, int8_t* q) {
    float whole[GROUP];
    store(whole, round_even(low));
    store(whole + LANES, round_even(high));
    Totals sums{};
    for (int i = 0; i < GROUP; i++) {
        q[i] = static_cast<int8_t>(whole[i]);
        sums.total += q[i];
        if (i < GROUP / 2) sums.half += q[i];
    }
    return sums;
}

#endif

inline Lanes magnitude(Lanes a) { return max(a, all(0.0f) - a); }

// Columns [first, first + count) of a row; first is a multiple of SPAN, count too unless the columns end there.
// x points to column `first`.
inline void quantize_columns(const float* x, int first, int count, int row, const QuantizedRows& out) {
    const Tiling tiling{out.rows};
    const int tile = tiling.tile_of(row), width = tiling.width(tile);
    const int64_t start = tiling.first(tile), place = row - start;
    for (int c = 0; c < count; c += SPAN) {
        const int cols = count - c < SPAN ? count - c : SPAN, parts = ceil_div(cols, GROUP) * (GROUP / LANES);
        Lanes part[SPAN / LANES];
        Lanes largest_of = all(0.0f), poison = all(0.0f);
        for (int i = 0; i < parts; i++) {
            const int left = cols - i * LANES;
            const float* at = x + c + i * LANES;
            part[i] = left >= LANES ? load(at) : left > 0 ? load(at, left) : all(0.0f);
            largest_of = max(magnitude(part[i]), largest_of);
            poison = fma(part[i], all(0.0f), poison);  // 0 * x is NaN for inf and NaN
        }
        const Rounding by = rounding(largest(largest_of), sum(poison) == 0.0f);
        const int span = (first + c) / SPAN, group = (first + c) / GROUP;
        out.scale[start * out.spans() + int64_t{span} * width + place] = by.scale;
        for (int i = 0; i < parts; i += 2) {
            const int64_t at = start * out.groups() + int64_t{group + i / 2} * width + place;
            const Lanes inverse = all(by.inverse);
            Totals sums{};
            if (by.inverse == 0.0f)
                std::memset(out.q + at * GROUP, 0, GROUP);
            else
                sums = round_group(part[i] * inverse, part[i + 1] * inverse, out.q + at * GROUP);
            out.total[at] = sums.total;
            out.half[at] = sums.half;
        }
    }
}

inline void quantize_row(const float* x, int row, const QuantizedRows& out) {
    quantize_columns(x, 0, out.cols, row, out);
}

}  // namespace tercet
