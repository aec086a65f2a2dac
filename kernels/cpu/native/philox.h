// Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011) for the noise of a draw: kernels/philox.py says what it is.
#pragma once

#include "written_out.h"

namespace tercet {

// What all the tokens of a row share.
struct NoiseKey {
    uint64_t seed;
    uint32_t position, choice;
};

// The product of the low 32 bits of each lane with a word.
inline Words times(const Words& lanes, uint32_t word) {
#if defined(TERCET_AVX512)
    const __m512i factor = _mm512_set1_epi64(word);
    return bits_of<Words>(_mm512_maskz_mul_epu32(0xff, bits_of<__m512i>(lanes), factor));  // plain: gcc 12 warns
#else
    return (lanes & 0xffffffffu) * uint64_t{word};
#endif
}

// The first word out, for eight token ids. Lanes carry dirt above 32 bits until the end: products don't look at it.
inline Words philox_words(const Words& token_ids, const NoiseKey& key) {
    constexpr uint32_t FIRST = 0xD2511F53, SECOND = 0xCD9E8D57;
    uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
    Words c0 = Words{} + uint64_t{key.position}, c1 = token_ids, c2 = Words{} + uint64_t{key.choice}, c3{};
    for (int round = 0; round < 10; round++) {
        const Words p0 = times(c0, FIRST), p1 = times(c2, SECOND);
        c0 = (p1 >> 32) ^ c1 ^ uint64_t{k0};
        c2 = (p0 >> 32) ^ c3 ^ uint64_t{k1};
        c1 = p1;
        c3 = p0;
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return c0 & 0xffffffffu;
}

// Standard Gumbel noise of a word, -log(-log((word + 1/2) / 2^32)).
inline Doubles gumbel_of(const Words& words) {
    const Doubles uniform = (__builtin_convertvector(words, Doubles) + 0.5) * 0x1p-32;
    return -log_of(-log_of(uniform));
}

constexpr double GUMBEL_LOWEST = -3.14, GUMBEL_HIGHEST = 22.88;  // rounded outward

}  // namespace tercet
