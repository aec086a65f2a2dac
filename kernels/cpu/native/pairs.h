// Sixteen pairs of bfloat16, and the product that attention is made of: lane += odd * odd, then lane += even * even.
//
// A product of two bfloat16 is exact in float, so each of the two steps rounds once in every instruction set, and all
// give the same bits, but for numbers below 2^-126, which avx512 takes as 0.
#pragma once

#include <cstring>

#include "bf16.h"
#include "lanes.h"

namespace tercet {

#if defined(TERCET_AVX512)

struct Pairs {
    __m512i v;
};

inline Pairs load_pairs(const bf16* p) { return {_mm512_loadu_si512(p)}; }
inline Pairs all_pairs(const bf16* p) {
    int32_t pair;
    std::memcpy(&pair, p, sizeof pair);
    return {_mm512_set1_epi32(pair)};
}
inline Lanes add_products(Lanes sum, Pairs a, Pairs b) {
    return {_mm512_dpbf16_ps(sum.v, std::bit_cast<__m512bh>(a.v), std::bit_cast<__m512bh>(b.v))};
}
inline Pairs rounded(Lanes first, Lanes second) {
    return {std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(second.v, first.v))};
}
inline void store(bf16* p, Pairs a) { _mm512_storeu_si512(p, a.v); }
// So that the compiler keeps it in a register instead of reading it again.
inline Pairs kept(Pairs a) {
    asm("" : "+v"(a.v));
    return a;
}
inline Lanes fused(Lanes a, Lanes b, Lanes c) { return fma(a, b, c); }
inline Lanes first_or(Lanes a, int n, float other) {
    return {_mm512_mask_mov_ps(_mm512_set1_ps(other), first_lanes(n), a.v)};
}
inline float largest_lane(Lanes a) { return _mm512_reduce_max_ps(a.v); }
// a * 2^n where x >= -126 or NaN, else 0; n: the low bits of `shifted`.
inline Lanes scaled(Lanes a, Lanes shifted, Lanes x) {
    const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
    const __mmask16 kept = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return {_mm512_castsi512_ps(_mm512_maskz_add_epi32(kept, _mm512_castps_si512(a.v), n))};
}

#elif defined(TERCET_AVX2)

struct Pairs {
    __m256i low, high;
};

inline Pairs load_pairs(const bf16* p) {
    const auto* words = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(words), _mm256_loadu_si256(words + 1)};
}
inline Pairs all_pairs(const bf16* p) {
    int32_t pair;
    std::memcpy(&pair, p, sizeof pair);
    const __m256i both = _mm256_set1_epi32(pair);
    return {both, both};
}
inline __m256 odd(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int32_t>(0xffff0000))));
}
inline __m256 even(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline Lanes add_products(Lanes sum, Pairs a, Pairs b) {
    const __m256 low = _mm256_fmadd_ps(odd(a.low), odd(b.low), sum.low);
    const __m256 high = _mm256_fmadd_ps(odd(a.high), odd(b.high), sum.high);
    return {_mm256_fmadd_ps(even(a.low), even(b.low), low), _mm256_fmadd_ps(even(a.high), even(b.high), high)};
}
inline __m128i rounded(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i lowest = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i number =
        _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(lowest, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i not_a_number = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
    const __m256i unordered = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i all = _mm256_blendv_epi8(number, not_a_number, unordered);
    return _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}
inline __m256i rounded(Lanes a) { return _mm256_set_m128i(rounded(a.high), rounded(a.low)); }
inline Pairs rounded(Lanes first, Lanes second) { return {rounded(first), rounded(second)}; }
inline void store(bf16* p, Pairs a) {
    auto* words = reinterpret_cast<__m256i*>(p);
    _mm256_storeu_si256(words, a.low);
    _mm256_storeu_si256(words + 1, a.high);
}
inline Pairs kept(Pairs a) { return a; }
inline Lanes fused(Lanes a, Lanes b, Lanes c) { return fma(a, b, c); }
inline Lanes first_or(Lanes a, int n, float other) {
    const __m256i place = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i low = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), place);
    const __m256i high = _mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), place);
    const __m256 others = _mm256_set1_ps(other);
    return {_mm256_blendv_ps(others, a.low, _mm256_castsi256_ps(low)),
            _mm256_blendv_ps(others, a.high, _mm256_castsi256_ps(high))};
}
inline float largest_lane(Lanes a) {
    const __m256 eight = _mm256_max_ps(a.low, a.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline __m256 scaled(__m256 a, __m256 shifted, __m256 x) {
    const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    const __m256 kept = _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ);
    return _mm256_and_ps(_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), n)), kept);
}
inline Lanes scaled(Lanes a, Lanes shifted, Lanes x) {
    return {scaled(a.low, shifted.low, x.low), scaled(a.high, shifted.high, x.high)};
}

#else

struct Pairs {
    uint32_t v[LANES];
};

inline Pairs load_pairs(const bf16* p) {
    Pairs out;
    std::memcpy(out.v, p, sizeof out.v);
    return out;
}
inline Pairs all_pairs(const bf16* p) {
    uint32_t pair;
    std::memcpy(&pair, p, sizeof pair);
    Pairs out;
    for (auto& one : out.v) one = pair;
    return out;
}
inline float odd(uint32_t pair) { return std::bit_cast<float>(pair & 0xffff0000); }
inline float even(uint32_t pair) { return std::bit_cast<float>(pair << 16); }
inline Lanes add_products(Lanes sum, Pairs a, Pairs b) {
    return lanewise([&](int i) { return sum.v[i] + odd(a.v[i]) * odd(b.v[i]) + even(a.v[i]) * even(b.v[i]); });
}
inline Pairs rounded(Lanes first, Lanes second) {
    bf16 all[2 * LANES];
    for (int i = 0; i < LANES; i++) {
        all[i] = rounded(first.v[i]);
        all[LANES + i] = rounded(second.v[i]);
    }
    return load_pairs(all);
}
inline void store(bf16* p, Pairs a) { std::memcpy(p, a.v, sizeof a.v); }
inline Pairs kept(Pairs a) { return a; }
// std::fma rounds once on every CPU, slowly where there is no such instruction.
inline Lanes fused(Lanes a, Lanes b, Lanes c) {
    return lanewise([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
}
inline Lanes first_or(Lanes a, int n, float other) {
    return lanewise([&](int i) { return i < n ? a.v[i] : other; });
}
inline float largest_lane(Lanes a) { return largest(a); }
inline Lanes scaled(Lanes a, Lanes shifted, Lanes x) {
    return lanewise([&](int i) {
        const uint32_t bits = std::bit_cast<uint32_t>(a.v[i]) + (std::bit_cast<uint32_t>(shifted.v[i]) << 23);
        return x.v[i] < -126.0f ? 0.0f : std::bit_cast<float>(bits);
    });
}

#endif

// To the second cache: the first is too small for what is worked on and what comes.
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// 2^x for x <= 0: 1 for 0, 0 below -126; a NaN stays one. The same bits in every instruction set.
// Adding 1.5 * 2^23 rounds x to a whole n and leaves n in the low bits. The polynomials are those with the least
// relative error on [-1/2, 1/2] among those that are 1 at 0.

// Within 2e-7 of it.
inline Lanes power_of_two_below_one(Lanes x) {
    const Lanes shift = all(12582912.0f);
    const Lanes shifted = x + shift;
    const Lanes rest = x - (shifted - shift);
    Lanes p = all(1.32647273e-3f);
    p = fused(p, rest, all(9.67151299e-3f));
    p = fused(p, rest, all(5.55073358e-2f));
    p = fused(p, rest, all(2.40222424e-1f));
    p = fused(p, rest, all(6.93147004e-1f));
    p = fused(p, rest, all(1.0f));
    return scaled(p, shifted, x);
}

// Within 1.1e-4 of it, for what will be rounded to bfloat16, which is up to 3.9e-3 off.
inline Lanes coarse_power_of_two_below_one(Lanes x) {
    const Lanes shift = all(12582912.0f);
    const Lanes shifted = x + shift;
    const Lanes rest = x - (shifted - shift);
    Lanes p = all(5.50089292e-2f);
    p = fused(p, rest, all(2.42210969e-1f));
    p = fused(p, rest, all(6.93282902e-1f));
    p = fused(p, rest, all(1.0f));
    return scaled(p, shifted, x);
}

}  // namespace tercet
