// Sums of one panel of floats with a few rows of float32 activations.
//
// float32 and float16: nothing is rounded but the sums. Column c is summed in chain c % 4, in order, then
// (chain 0 + chain 1) + (chain 2 + chain 3).
// bfloat16 with AVX-512: activations are rounded to bfloat16 too (denormals to zero) and multiplied by vdpbf16ps; pair p
// of columns is summed in chain p % 2, then chain 0 + chain 1. Elsewhere as float16.
#pragma once

#include "half.h"
#include "panels.h"

namespace tercet {

constexpr int FLOAT_CHAINS = 4;

// Whether both sides are rounded to bfloat16.
constexpr bool in_brain(Format format) {
#if defined(TERCET_AVX512)
    return format == FLOATS_BRAIN;
#else
    (void)format;
    return false;
#endif
}

// Column c of a panel's 16 rows.
template <Format F>
inline Lanes load_weights(const uint8_t* panel, int c) {
    const uint8_t* at = panel + float_at(F, c, 0);
    if constexpr (F == FLOATS) return load(reinterpret_cast<const float*>(at));
#if defined(TERCET_AVX512)
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)))};
#else
    float whole[PANEL];
    for (int r = 0; r < PANEL; r++) {
        uint16_t narrow;
        std::memcpy(&narrow, at + (F == FLOATS_BRAIN ? 4 : 2) * r, 2);
        whole[r] = F == FLOATS_HALF ? from_half(narrow) : from_brain(narrow);
    }
    return load(whole);
#endif
}

// sums [WIDTH][PANEL]. x: rows `pitch` floats apart.
template <Format F, int WIDTH>
    requires(!in_brain(F))
void add_up_floats(const uint8_t* panel, int cols, const float* x, int64_t pitch, float* sums) {
    Lanes chains[WIDTH][FLOAT_CHAINS];
    for (int t = 0; t < WIDTH; t++)
        for (int i = 0; i < FLOAT_CHAINS; i++) chains[t][i] = all(0.0f);
    int c = 0;
    for (; c + FLOAT_CHAINS <= cols; c += FLOAT_CHAINS)
#pragma GCC unroll 4
        for (int i = 0; i < FLOAT_CHAINS; i++) {
            const Lanes weights = load_weights<F>(panel, c + i);
#pragma GCC unroll 4
            for (int t = 0; t < WIDTH; t++) chains[t][i] = fma(weights, all(x[t * pitch + c + i]), chains[t][i]);
        }
#pragma GCC unroll 4
    for (int i = 0; i < FLOAT_CHAINS - 1; i++) {
        if (c + i >= cols) break;
        const Lanes weights = load_weights<F>(panel, c + i);
        for (int t = 0; t < WIDTH; t++) chains[t][i] = fma(weights, all(x[t * pitch + c + i]), chains[t][i]);
    }
    for (int t = 0; t < WIDTH; t++)
        store(sums + t * PANEL, (chains[t][0] + chains[t][1]) + (chains[t][2] + chains[t][3]));
}

#if defined(TERCET_AVX512)

constexpr int BRAIN_COLUMNS = 128;  // that are rounded at a time
constexpr int BRAIN_AHEAD = 8192;   // as AHEAD (integers_avx512.h)

// 32 columns from `at` on, of which `left` there are; the rest are zeros.
inline __m512bh round_to_brain(const float* at, int left) {
    const auto some = [](int n) { return static_cast<__mmask16>(n >= LANES ? 0xffff : n > 0 ? (1 << n) - 1 : 0); };
    const __m512 low = _mm512_maskz_loadu_ps(some(left), at);
    const __m512 high = _mm512_maskz_loadu_ps(some(left - LANES), at + LANES);
    return _mm512_cvtne2ps_pbh(high, low);
}

template <Format F, int WIDTH>
    requires(in_brain(F))
void add_up_floats(const uint8_t* panel, int cols, const float* x, int64_t pitch, float* sums) {
    alignas(64) uint16_t rounded[WIDTH][BRAIN_COLUMNS];
    __m512 chains[WIDTH][2];
#pragma GCC unroll 8
    for (int t = 0; t < WIDTH; t++) chains[t][0] = chains[t][1] = _mm512_setzero_ps();
    for (int start = 0; start < cols; start += BRAIN_COLUMNS) {
        const int count = cols - start < BRAIN_COLUMNS ? cols - start : BRAIN_COLUMNS;
        for (int t = 0; t < WIDTH; t++)
            for (int c = 0; c < count; c += 32)
                *reinterpret_cast<__m512bh*>(rounded[t] + c) =
                    round_to_brain(x + t * pitch + start + c, count - c);
        const int pairs = ceil_div(count, 2);
        const uint8_t* weights = panel + float_at(F, start, 0);
        for (int p = 0; p < pairs; p += 2)
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                if (p + i >= pairs) break;
                const uint8_t* at = weights + (p + i) * 64;
                _mm_prefetch(at + BRAIN_AHEAD, _MM_HINT_T1);
                const auto w = reinterpret_cast<__m512bh>(_mm512_loadu_si512(at));
#pragma GCC unroll 8
                for (int t = 0; t < WIDTH; t++) {
                    int32_t pair;
                    std::memcpy(&pair, rounded[t] + 2 * (p + i), 4);
                    const auto columns = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
                    chains[t][i] = _mm512_dpbf16_ps(chains[t][i], w, columns);
                }
            }
    }
#pragma GCC unroll 8
    for (int t = 0; t < WIDTH; t++) _mm512_storeu_ps(sums + t * PANEL, _mm512_add_ps(chains[t][0], chains[t][1]));
}

#endif

}  // namespace tercet
