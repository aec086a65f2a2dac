// bfloat16 as its 16 bits: the upper half of a float.
#pragma once

#include <bit>
#include <cstdint>

namespace tercet {

using bf16 = uint16_t;

// To nearest, halves to even; a NaN stays one.
inline bf16 rounded(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t number = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const uint32_t not_a_number = bits >> 16 | 0x40;
    return static_cast<bf16>((bits & 0x7fffffff) > 0x7f800000 ? not_a_number : number);
}

inline float widened(bf16 x) { return std::bit_cast<float>(uint32_t{x} << 16); }

}  // namespace tercet
