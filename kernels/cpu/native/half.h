// float16 and bfloat16 beside float32.
#pragma once

#include <bit>
#include <cstdint>

namespace tercet {

inline float from_half(uint16_t half) {
    const uint32_t sign = uint32_t{half & 0x8000u} << 16, exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | fraction << 13);
    if (exponent == 0)
        return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(static_cast<float>(fraction) * 0x1p-24f));
    return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
}

// Of a value that float16 holds exactly.
inline uint16_t to_half(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value), sign = bits >> 16 & 0x8000, exponent = bits >> 23 & 255;
    if (exponent == 255) return static_cast<uint16_t>(sign | 0x7c00 | (bits >> 13 & 1023));
    if (exponent >= 113) return static_cast<uint16_t>(sign | (exponent - 112) << 10 | (bits >> 13 & 1023));
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::bit_cast<float>(bits & 0x7fffffff) * 0x1p24f));
}

inline float from_brain(uint16_t brain) { return std::bit_cast<float>(uint32_t{brain} << 16); }

// Of a value that bfloat16 holds exactly.
inline uint16_t to_brain(float value) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16); }

}  // namespace tercet
