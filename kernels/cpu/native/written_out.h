// log and exp in float64 of eight numbers, written out as in kernels/written_out.py, operation by operation: only
// additions, multiplications and divisions, each rounded once, so every instruction set gives the same bits.
//
// Eight lanes are a vector type of the compiler: one code for all instruction sets.
#pragma once

#include <cstdint>
#include <cstring>

#include "isa.h"

namespace tercet {

typedef double Doubles __attribute__((vector_size(64)));
typedef int64_t Longs __attribute__((vector_size(64)));
typedef uint64_t Words __attribute__((vector_size(64)));  // each lane holds a word of 32 bits, or a product of 64
constexpr int EIGHT = 8;  // lanes

constexpr int WEIGHT_BITS = 44;
constexpr double WEIGHTLESS = -32.0;  // scores below it weigh nothing

inline Doubles eight(double value) { return Doubles{} + value; }

template <class To, class From>
inline To bits_of(const From& from) {
    To to;
    static_assert(sizeof(To) == sizeof(From));
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// Natural logarithm of positive normal numbers.
inline Doubles log_of(const Doubles& x) {
    const Longs bits = bits_of<Longs>(x);
    Longs exponent = (bits >> 52) - 1023;
    Doubles mantissa = bits_of<Doubles>((bits & ((int64_t{1} << 52) - 1)) | (int64_t{1023} << 52));
    const Longs high = mantissa > 1.4142135623730951;  // -1 where it holds
    mantissa = high ? mantissa * 0.5 : mantissa;
    exponent -= high;
    const Doubles s = (mantissa - 1.0) / (mantissa + 1.0);
    const Doubles z = s * s;
    Doubles series = eight(1.0 / 21);
    series = series * z + 1.0 / 19;
    series = series * z + 1.0 / 17;
    series = series * z + 1.0 / 15;
    series = series * z + 1.0 / 13;
    series = series * z + 1.0 / 11;
    series = series * z + 1.0 / 9;
    series = series * z + 1.0 / 7;
    series = series * z + 1.0 / 5;
    series = series * z + 1.0 / 3;
    return __builtin_convertvector(exponent, Doubles) * 0.6931471805599453 + (s + s) * (series * z + 1.0);
}

// round(exp(score) * 2^WEIGHT_BITS) of scores that are at most 0, or -inf.
inline Longs weights_of(const Doubles& scores) {
    constexpr double ROUNDER = 6755399441055744.0;  // 1.5 * 2^52
    const Longs weightless = scores < WEIGHTLESS;
    const Doubles x = weightless ? eight(WEIGHTLESS) : scores;
    const Doubles power = (x * 1.4426950408889634 + ROUNDER) - ROUNDER;
    const Doubles r = (x - power * 0.6931467056274414) - power * 4.7493250390316726e-07;
    Doubles series = eight(1.0 / 6227020800);
    series = series * r + 1.0 / 479001600;
    series = series * r + 1.0 / 39916800;
    series = series * r + 1.0 / 3628800;
    series = series * r + 1.0 / 362880;
    series = series * r + 1.0 / 40320;
    series = series * r + 1.0 / 5040;
    series = series * r + 1.0 / 720;
    series = series * r + 1.0 / 120;
    series = series * r + 1.0 / 24;
    series = series * r + 1.0 / 6;
    series = series * r + 1.0 / 2;
    series = series * r + 1.0;
    series = series * r + 1.0;
    const Longs exponent = (__builtin_convertvector(power, Longs) + (1023 + WEIGHT_BITS)) << 52;
    const Doubles whole = (series * bits_of<Doubles>(exponent) + ROUNDER) - ROUNDER;
    return weightless ? Longs{} : __builtin_convertvector(whole, Longs);
}

}  // namespace tercet
