// How a weight matrix lies in memory: as panels of 16 rows, each a run of bytes that a kernel reads once, in order.
//
// An integer format is one idea: w = scale * u + minimum, u unsigned, one scale and minimum per group of columns.
//   nibbles  u has 4 bits, and two of them share a byte; otherwise u is a byte
//   affine   minimums are stored; otherwise minimum = -OFFSET * scale, OFFSET being 8 or 128
//   halves   scales (and minimums) are float16, as in the file; otherwise float32
//   per      columns of a scale: 32, 16, or 0 for the whole row
// A panel holds, one after the other, each filled up to 64 bytes:
//   scales    [groups][32 / per][16 rows], or [16 rows]
//   minimums  [groups][16 rows], if affine
//   integers  [groups], each 8 steps of 4 columns: byte 4 r + i of step j is row r, column 4 j + i. Of nibbles there are
//             4 steps; the upper halves of step j are step j + 4.
// A panel of floats holds [cols][16 rows] of float32 or float16, or [cols / 2][16 rows][2] of bfloat16.
// Rows and columns that fill up are zeros, and nothing of theirs gets into a result.
#pragma once

#include <cstdint>

#include "activations.h"

namespace tercet {

constexpr int PANEL = 16;  // rows

enum Format : int32_t {
    NIBBLES_HALF,         // Q4_0
    NIBBLES_AFFINE_HALF,  // Q4_1
    NIBBLES_AFFINE,       // Q4_K
    BYTES_HALF,           // Q8_0, Q5_0
    BYTES_AFFINE_HALF,    // Q5_1
    BYTES_AFFINE,         // Q5_K
    BYTES_SIXTEENS,       // Q6_K
    BYTES_ROWS,           // int8 with a scale for a row
    FLOATS,               // F32
    FLOATS_HALF,          // F16
    FLOATS_BRAIN,         // BF16
    FORMATS
};

struct IntegerLayout {
    bool nibbles, affine, halves;
    int per;

    constexpr int offset() const { return nibbles ? 8 : 128; }
    constexpr int scale_bytes() const { return halves ? 2 : 4; }
    constexpr int group_bytes() const { return PANEL * GROUP / (nibbles ? 2 : 1); }
    constexpr int scales(int groups) const { return per == 0 ? 1 : groups * (GROUP / per); }  // of a row
    constexpr int64_t scales_size(int groups) const { return filled(int64_t{scales(groups)} * PANEL * scale_bytes()); }
    constexpr int64_t minimums_at(int groups) const { return scales_size(groups); }
    constexpr int64_t integers_at(int groups) const { return scales_size(groups) * (affine ? 2 : 1); }
    constexpr int64_t panel_bytes(int groups) const { return integers_at(groups) + int64_t{groups} * group_bytes(); }

private:
    static constexpr int64_t filled(int64_t size) { return (size + 63) / 64 * 64; }
};

constexpr bool is_integer(Format format) { return format < FLOATS; }

constexpr IntegerLayout LAYOUTS[] = {
    {true, false, true, 32},    // NIBBLES_HALF
    {true, true, true, 32},     // NIBBLES_AFFINE_HALF
    {true, true, false, 32},    // NIBBLES_AFFINE
    {false, false, true, 32},   // BYTES_HALF
    {false, true, true, 32},    // BYTES_AFFINE_HALF
    {false, true, false, 32},   // BYTES_AFFINE
    {false, false, false, 16},  // BYTES_SIXTEENS
    {false, false, false, 0},   // BYTES_ROWS
};

constexpr int float_bytes(Format format) { return format == FLOATS ? 4 : 2; }

constexpr int64_t panel_bytes(Format format, int cols) {
    if (is_integer(format)) return LAYOUTS[format].panel_bytes(ceil_div(cols, GROUP));
    return (int64_t{cols} * PANEL * float_bytes(format) + 63) / 64 * 64;  // whole pairs of columns
}

// Where a panel of floats has column c of row r.
constexpr int64_t float_at(Format format, int c, int r) {
    if (format == FLOATS_BRAIN) return (int64_t{c / 2} * PANEL + r) * 4 + c % 2 * 2;
    return (int64_t{c} * PANEL + r) * float_bytes(format);
}

struct Panel {
    const uint8_t* data;
    int32_t first_row;
    int32_t rows;  // that count, of the 16
    Format format;
    int32_t reserved;
};

struct Matrix {
    const Panel* panels;
    int32_t count, rows, cols;
    int32_t planes;    // of the quantized activations that some panel reads; 0: none does
    int32_t floats;    // some panel reads float32 activations
};

}  // namespace tercet
