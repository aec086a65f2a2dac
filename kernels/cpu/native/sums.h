// The sums of a panel with some rows, by format and number of rows. They are compiled apart, each once.
#pragma once

#include "panels.h"

namespace tercet {

// Rows that are computed together, at most.
constexpr int widest(Format format) {
#if defined(TERCET_AVX512)
    if (!is_integer(format)) return format == FLOATS_BRAIN ? 8 : 4;
    return TILE;
#elif defined(TERCET_AVX2)
    (void)format;
    return 4;
#else
    (void)format;
    return 1;
#endif
}

// sums [rows][PANEL].
using AddUp = void (*)(const uint8_t* panel, int groups, const QuantizedTile& x, float* sums);
using AddUpFloats = void (*)(const uint8_t* panel, int cols, const float* x, int64_t pitch, float* sums);

// [rows - 1], up to widest(format).
const AddUp* nibble_sums(Format format, int planes);
const AddUp* byte_sums(Format format, int planes);
const AddUpFloats* float_sums(Format format);

inline const AddUp* integer_sums(Format format, int planes) {
    return LAYOUTS[format].nibbles ? nibble_sums(format, planes) : byte_sums(format, planes);
}

}  // namespace tercet
