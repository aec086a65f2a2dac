// Sums of one panel of floats with a few rows of float32 activations; nothing is rounded but the sums.
//
// Column c is summed in chain c % 4, in order, then (chain 0 + chain 1) + (chain 2 + chain 3).
#pragma once

#include "half.h"
#include "panels.h"

namespace tercet {

constexpr int FLOAT_CHAINS = 4;

template <Format F>
inline Lanes load_weights(const uint8_t* at) {
    if constexpr (F == FLOATS) {
        return load(reinterpret_cast<const float*>(at));
    } else {
#if defined(TERCET_AVX512)
        const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
        if constexpr (F == FLOATS_HALF)
            return {_mm512_cvtph_ps(raw)};
        else
            return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
#else
        uint16_t raw[PANEL];
        float whole[PANEL];
        std::memcpy(raw, at, sizeof raw);
        for (int r = 0; r < PANEL; r++) whole[r] = F == FLOATS_HALF ? from_half(raw[r]) : from_brain(raw[r]);
        return load(whole);
#endif
    }
}

// sums [WIDTH][PANEL]. x: rows `pitch` floats apart.
template <Format F, int WIDTH>
void add_up_floats(const uint8_t* panel, int cols, const float* x, int64_t pitch, float* sums) {
    constexpr int BYTES = PANEL * float_bytes(F);
    Lanes chains[WIDTH][FLOAT_CHAINS];
    for (int t = 0; t < WIDTH; t++)
        for (int i = 0; i < FLOAT_CHAINS; i++) chains[t][i] = all(0.0f);
    int c = 0;
    for (; c + FLOAT_CHAINS <= cols; c += FLOAT_CHAINS)
#pragma GCC unroll 4
        for (int i = 0; i < FLOAT_CHAINS; i++) {
            const Lanes weights = load_weights<F>(panel + int64_t{c + i} * BYTES);
#pragma GCC unroll 4
            for (int t = 0; t < WIDTH; t++) chains[t][i] = fma(weights, all(x[t * pitch + c + i]), chains[t][i]);
        }
#pragma GCC unroll 4
    for (int i = 0; i < FLOAT_CHAINS - 1; i++) {
        if (c + i >= cols) break;
        const Lanes weights = load_weights<F>(panel + int64_t{c + i} * BYTES);
        for (int t = 0; t < WIDTH; t++) chains[t][i] = fma(weights, all(x[t * pitch + c + i]), chains[t][i]);
    }
    for (int t = 0; t < WIDTH; t++)
        store(sums + t * PANEL, (chains[t][0] + chains[t][1]) + (chains[t][2] + chains[t][3]));
}

}  // namespace tercet
