// Sixteen floats that are computed together: one register, two, or an array.
//
// What is written with Lanes has the same order of operations in every instruction set, so ops that only need these are
// written once. fma rounds once where the hardware can, and twice in `generic`; max(a, b) and min(a, b) give b if
// either is NaN.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "isa.h"

namespace tercet {

constexpr int LANES = 16;

#if defined(TERCET_AVX512)

struct Lanes {
    __m512 v;
};

inline Lanes all(float x) { return {_mm512_set1_ps(x)}; }
inline Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }
inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }
inline Lanes load(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
inline void store(float* p, Lanes a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
inline Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes operator-(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes operator/(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Lanes max(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Lanes min(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Lanes round_even(Lanes a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// 2^n for whole n in [-126, 127].
inline Lanes power_of_two(Lanes n) {
    const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(biased, 23))};
}

#elif defined(TERCET_AVX2)

struct Lanes {
    __m256 low, high;
};

inline Lanes all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Lanes a) {
    _mm256_storeu_ps(p, a.low);
    _mm256_storeu_ps(p + 8, a.high);
}
inline Lanes load(const float* p, int n) {
    alignas(32) float whole[LANES] = {};
    std::memcpy(whole, p, n * sizeof(float));
    return load(whole);
}
inline void store(float* p, Lanes a, int n) {
    alignas(32) float whole[LANES];
    store(whole, a);
    std::memcpy(p, whole, n * sizeof(float));
}
inline Lanes operator+(Lanes a, Lanes b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Lanes operator-(Lanes a, Lanes b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Lanes operator/(Lanes a, Lanes b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Lanes max(Lanes a, Lanes b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Lanes min(Lanes a, Lanes b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline Lanes round_even(Lanes a) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.low, nearest), _mm256_round_ps(a.high, nearest)};
}
inline __m256 power_of_two(__m256 n) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
inline Lanes power_of_two(Lanes n) { return {power_of_two(n.low), power_of_two(n.high)}; }

#else

struct Lanes {
    float v[LANES];
};

template <class Each>
inline Lanes lanewise(Each each) {
    Lanes out;
    for (int i = 0; i < LANES; i++) out.v[i] = each(i);
    return out;
}
inline Lanes all(float x) {
    return lanewise([&](int) { return x; });
}
inline Lanes load(const float* p) {
    return lanewise([&](int i) { return p[i]; });
}
inline void store(float* p, Lanes a) { std::memcpy(p, a.v, sizeof a.v); }
inline Lanes load(const float* p, int n) {
    return lanewise([&](int i) { return i < n ? p[i] : 0.0f; });
}
inline void store(float* p, Lanes a, int n) { std::memcpy(p, a.v, n * sizeof(float)); }
inline Lanes operator+(Lanes a, Lanes b) {
    return lanewise([&](int i) { return a.v[i] + b.v[i]; });
}
inline Lanes operator-(Lanes a, Lanes b) {
    return lanewise([&](int i) { return a.v[i] - b.v[i]; });
}
inline Lanes operator*(Lanes a, Lanes b) {
    return lanewise([&](int i) { return a.v[i] * b.v[i]; });
}
inline Lanes operator/(Lanes a, Lanes b) {
    return lanewise([&](int i) { return a.v[i] / b.v[i]; });
}
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
    return lanewise([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline Lanes max(Lanes a, Lanes b) {
    return lanewise([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Lanes min(Lanes a, Lanes b) {
    return lanewise([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
// Adding 1.5 * 2^23 leaves no bits for a fraction. For |a| < 2^22.
inline Lanes round_even(Lanes a) {
    return lanewise([&](int i) { return (a.v[i] + 12582912.0f) - 12582912.0f; });
}
inline Lanes power_of_two(Lanes n) {
    return lanewise([&](int i) {
        const int32_t whole = n.v[i] == n.v[i] ? static_cast<int32_t>(n.v[i]) : 0;  // a NaN has no integer
        return std::bit_cast<float>((whole + 127) << 23);
    });
}

#endif

// The sixteen in one fixed order: halves onto each other, four times.
inline float sum(Lanes a) {
#if defined(TERCET_AVX512) || defined(TERCET_AVX2)
#if defined(TERCET_AVX512)
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
#else
    const __m256 eight = _mm256_add_ps(a.low, a.high);
#endif
    __m128 rest = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    rest = _mm_add_ps(rest, _mm_movehl_ps(rest, rest));
    return _mm_cvtss_f32(_mm_add_ss(rest, _mm_movehdup_ps(rest)));
#else
    alignas(64) float v[LANES];
    store(v, a);
    for (int half = LANES / 2; half >= 1; half /= 2)
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    return v[0];
#endif
}

inline float largest(Lanes a) {
#if defined(TERCET_AVX512) || defined(TERCET_AVX2)
#if defined(TERCET_AVX512)
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
#else
    const __m256 eight = _mm256_max_ps(a.low, a.high);
#endif
    __m128 rest = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    rest = _mm_max_ps(rest, _mm_movehl_ps(rest, rest));
    return _mm_cvtss_f32(_mm_max_ss(rest, _mm_movehdup_ps(rest)));
#else
    alignas(64) float v[LANES];
    store(v, a);
    for (int half = LANES / 2; half >= 1; half /= 2)
        for (int i = 0; i < half; i++) v[i] = v[i] > v[i + half] ? v[i] : v[i + half];
    return v[0];
#endif
}

// e^x, within 2 units in the last place; from -87 to 88, beyond which x counts as these. NaN stays NaN.
// Cody and Waite's reduction by ln 2 in two parts, then the polynomial of Cephes' expf.
inline Lanes exp(Lanes x) {
    x = min(all(88.0f), max(all(-87.0f), x));
    const Lanes n = round_even(x * all(1.44269504088896341f));
    Lanes r = fma(n, all(-0.693359375f), x);
    r = fma(n, all(2.12194440e-4f), r);
    Lanes p = all(1.9875691500e-4f);
    p = fma(p, r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    p = fma(p, r * r, r) + all(1.0f);
    return p * power_of_two(n);
}

}  // namespace tercet
