// Between rows of weights and panels: packing at load, and single rows back out of them, both exact.
#pragma once

#include <cstring>

#include "half.h"
#include "panels.h"

namespace tercet {

// Rows as `executor.quant.ggml.Groups` has them: w = scale * (u - zero) + minimum.
struct Unpacked {
    const uint8_t* q;      // [rows][cols]; as signed bytes if `is_signed`
    const float* scale;    // [rows][cols / per], or [rows]
    const float* minimum;  // likewise, or null
    int cols;
    bool is_signed;  // then u = q + OFFSET, and there is no minimum
};

inline void store_scale(bool halves, float scale, uint8_t* at) {
    const uint16_t half = to_half(scale);
    if (halves)
        std::memcpy(at, &half, 2);
    else
        std::memcpy(at, &scale, 4);
}

inline float load_stored(bool halves, const uint8_t* at) {
    uint16_t half;
    float scale;
    if (halves) {
        std::memcpy(&half, at, 2);
        return from_half(half);
    }
    std::memcpy(&scale, at, 4);
    return scale;
}

// `rows` of the panel come from `from`, the rest are zeros. out: panel_bytes(format, cols), zeroed.
inline void pack_integers(Format format, const Unpacked& from, int rows, uint8_t* out) {
    const IntegerLayout layout = LAYOUTS[format];
    const int groups = ceil_div(from.cols, GROUP), scales = layout.scales(groups), size = layout.scale_bytes();
    const uint8_t offset = from.is_signed ? layout.offset() : 0, mask = layout.nibbles ? 15 : 255;
    uint8_t* integers = out + layout.integers_at(groups);
    for (int r = 0; r < rows; r++) {
        for (int s = 0; s < scales; s++)
            store_scale(layout.halves, from.scale[int64_t{r} * scales + s], out + (s * PANEL + r) * size);
        for (int g = 0; layout.affine && g < groups; g++)
            store_scale(layout.halves, from.minimum[int64_t{r} * groups + g],
                        out + layout.minimums_at(groups) + (g * PANEL + r) * size);
    }
    for (int g = 0; g < groups; g++)
        for (int r = 0; r < rows; r++) {
            const uint8_t* q = from.q + int64_t{r} * from.cols + g * GROUP;
            uint8_t* at = integers + int64_t{g} * layout.group_bytes() + 4 * r;
            uint8_t u[GROUP] = {};
            const int cols = from.cols - g * GROUP < GROUP ? from.cols - g * GROUP : GROUP;
            for (int c = 0; c < cols; c++) u[c] = static_cast<uint8_t>(q[c] + offset) & mask;
            if (layout.nibbles)
                for (int c = 0; c < GROUP / 2; c++) u[c] |= static_cast<uint8_t>(u[c + GROUP / 2] << 4);
            for (int j = 0; j < (layout.nibbles ? 4 : 8); j++) std::memcpy(at + 64 * j, u + 4 * j, 4);
        }
}

// weights [rows][cols], each of them exact in the format.
inline void pack_floats(Format format, const float* weights, int cols, int rows, uint8_t* out) {
    for (int c = 0; c < cols; c++)
        for (int r = 0; r < rows; r++) {
            const float value = weights[int64_t{r} * cols + c];
            const uint16_t narrow = format == FLOATS_HALF ? to_half(value) : to_brain(value);
            uint8_t* at = out + float_at(format, c, r);
            if (format == FLOATS)
                std::memcpy(at, &value, 4);
            else
                std::memcpy(at, &narrow, 2);
        }
}

// One row of a panel. out [cols].
inline void decode_row(const Panel& panel, int cols, int r, float* out) {
    if (!is_integer(panel.format)) {
        for (int c = 0; c < cols; c++) {
            const uint8_t* at = panel.data + float_at(panel.format, c, r);
            uint16_t narrow;
            std::memcpy(&narrow, at, 2);
            if (panel.format == FLOATS)
                std::memcpy(out + c, at, 4);
            else
                out[c] = panel.format == FLOATS_HALF ? from_half(narrow) : from_brain(narrow);
        }
        return;
    }
    const IntegerLayout layout = LAYOUTS[panel.format];
    const int groups = ceil_div(cols, GROUP), size = layout.scale_bytes();
    const uint8_t* minimums = panel.data + layout.minimums_at(groups);
    const uint8_t* integers = panel.data + layout.integers_at(groups);
    for (int c = 0; c < cols; c++) {
        const int g = c / GROUP, step = c % GROUP / 4;
        const int s = layout.per ? c / layout.per : 0;
        const float scale = load_stored(layout.halves, panel.data + (s * PANEL + r) * size);
        const uint8_t* at = integers + int64_t{g} * layout.group_bytes() + 4 * r + c % 4;
        const int u = layout.nibbles ? at[64 * (step % 4)] >> (step / 4 * 4) & 15 : at[64 * step];
        if (layout.affine)
            out[c] = scale * static_cast<float>(u) + load_stored(layout.halves, minimums + (g * PANEL + r) * size);
        else
            out[c] = scale * static_cast<float>(u - layout.offset());
    }
}

// One row of a matrix. out [cols].
inline void decode_row(const Matrix& matrix, int row, float* out) {
    int low = 0, high = matrix.count - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (matrix.panels[middle].first_row <= row)
            low = middle;
        else
            high = middle - 1;
    }
    decode_row(matrix.panels[low], matrix.cols, row - matrix.panels[low].first_row, out);
}

}  // namespace tercet
