// Looking through one row of logits: its largest, those above a cut, the k largest.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>

#include "isa.h"

namespace tercet {

typedef float Floats __attribute__((vector_size(64)));
constexpr int BLOCK = 64;   // logits that share an entry of `peaks`
constexpr int SPARE = 16;   // elements that `collect` may write behind its count

inline Floats load_floats(const float* from) {
    Floats value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}

struct Highest {
    float value;  // NaN where any is NaN
    int32_t id;   // the lowest of equals; means nothing where value is NaN
};

// peaks: the largest of each BLOCK logits, [ceil(count / BLOCK)].
inline Highest find_highest(const float* logits, int count, float* peaks) {
    float highest = -std::numeric_limits<float>::infinity();
    bool nan = false;
    for (int start = 0; start < count; start += BLOCK) {
        float peak = -std::numeric_limits<float>::infinity();
        if (start + BLOCK <= count) {
            const Floats a = load_floats(logits + start), b = load_floats(logits + start + 16);
            const Floats c = load_floats(logits + start + 32), d = load_floats(logits + start + 48);
            const Floats ab = a > b ? a : b, cd = c > d ? c : d;
            const Floats top = ab > cd ? ab : cd;
            const auto unequal = (a != a) | (b != b) | (c != c) | (d != d);
            int32_t dirty = 0;
            for (int lane = 0; lane < 16; lane++) {
                peak = top[lane] > peak ? top[lane] : peak;
                dirty |= unequal[lane];
            }
            nan |= dirty != 0;
        } else {
            for (int i = start; i < count; i++) {
                peak = logits[i] > peak ? logits[i] : peak;
                nan |= logits[i] != logits[i];
            }
        }
        peaks[start / BLOCK] = peak;
        highest = peak > highest ? peak : highest;
    }
    if (nan) return {std::numeric_limits<float>::quiet_NaN(), 0};
    int block = 0;
    while (peaks[block] != highest) block++;
    int32_t id = block * BLOCK;
    while (logits[id] != highest) id++;
    return {highest, id};
}

// Logits that are at least `cut`, with their ids, ascending. Writes up to SPARE elements more than it returns.
inline int collect(const float* logits, int count, const float* peaks, float cut, int32_t* ids, float* values) {
    int found = 0;
    for (int start = 0; start < count; start += BLOCK) {
        if (peaks[start / BLOCK] < cut) continue;
        const int stop = std::min(start + BLOCK, count);
        int i = start;
#if defined(TERCET_AVX512)
        const __m512 least = _mm512_set1_ps(cut);
        const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        for (; i + 16 <= stop; i += 16) {
            const __m512 value = _mm512_loadu_ps(logits + i);
            const __mmask16 mask = _mm512_cmp_ps_mask(value, least, _CMP_GE_OQ);
            _mm512_storeu_ps(values + found, _mm512_maskz_compress_ps(mask, value));
            const __m512i id = _mm512_add_epi32(lanes, _mm512_set1_epi32(i));
            _mm512_storeu_si512(ids + found, _mm512_maskz_compress_epi32(mask, id));
            found += __builtin_popcount(mask);
        }
#endif
        for (; i < stop; i++) {
            ids[found] = i;
            values[found] = logits[i];
            found += logits[i] >= cut;
        }
    }
    return found;
}

// The k largest, k >= 1, that are at least `least`: the lowest ids of equals, ids ascending. scratch: [count + blocks].
//
// The k-th largest peak is at most the k-th largest logit, so a row is looked through once, against that.
inline int collect_top_k(const float* logits, int count, const float* peaks, int64_t k, float least, int32_t* ids,
                         float* values, float* scratch) {
    const int blocks = (count + BLOCK - 1) / BLOCK;
    float cut = least;
    if (k < blocks) {
        std::copy(peaks, peaks + blocks, scratch);
        std::nth_element(scratch, scratch + (k - 1), scratch + blocks, std::greater<>());
        cut = std::max(cut, scratch[k - 1]);
    }
    const int found = collect(logits, count, peaks, cut, ids, values);
    if (found <= k) return found;
    std::copy(values, values + found, scratch);
    std::nth_element(scratch, scratch + (k - 1), scratch + found, std::greater<>());
    const float smallest = scratch[k - 1];
    int64_t ties = k;
    for (int i = 0; i < found; i++) ties -= values[i] > smallest;
    int kept = 0;
    for (int i = 0; i < found; i++) {
        const bool tie = values[i] == smallest;
        if (!(values[i] > smallest || (tie && ties > 0))) continue;
        ties -= tie;
        ids[kept] = ids[i];
        values[kept] = values[i];
        kept++;
    }
    return kept;
}

}  // namespace tercet
