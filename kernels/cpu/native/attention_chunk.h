// One chunk of keys and some rows: scores, weights, and the sums that go on from chunk to chunk. What order sums have, and
// why it depends on nothing else, is said in attention.h.
#pragma once

#include <algorithm>
#include <cstring>

#include "attention_plan.h"
#include "pairs.h"

namespace tercet {

// Registers of scores: rows times units of keys; and of sums: rows times sixteen dimensions.
#if defined(TERCET_AVX512)
constexpr int MICRO_ROWS = 6, MICRO_WIDTH = 4;
#else
constexpr int MICRO_ROWS = 3, MICRO_WIDTH = 1;
#endif

constexpr int CHUNK_UNITS = CHUNK / UNIT;
constexpr float LOWEST = -1e30f;  // a maximum of no scores

// What is known of rows after some keys. sum [rows][padded_dim], weight [rows][UNIT], maximum [rows], log2 of the unit.
struct RowStates {
    float* sum;
    float* weight;
    float* maximum;
};

inline RowStates states_at(float* memory, int rows, int padded_dim) {
    float* weight = memory + int64_t{rows} * padded_dim;
    return {memory, weight, weight + int64_t{rows} * UNIT};
}

inline void clear(RowStates states, int rows, int padded_dim) {
    std::memset(states.sum, 0, sizeof(float) * rows * padded_dim);
    std::memset(states.weight, 0, sizeof(float) * rows * UNIT);
    std::fill(states.maximum, states.maximum + rows, LOWEST);
}

// Up to CHUNK keys, unit by unit as pages.h lays out units of 16 tokens of padded_dim dimensions.
struct KeyChunk {
    const bf16* keys[CHUNK_UNITS];
    const bf16* values[CHUNK_UNITS];
    int units;
};

// scores[r][u * UNIT + lane] of rows r < R and units u < W. queries [R][dim], scores [R][CHUNK]. With AHEAD, what lies
// at the same place of the units `ahead` is fetched.
template <int R, int W, bool AHEAD>
inline void score(const bf16* queries, int dim, const bf16* const* keys, const bf16* const* ahead, float* scores) {
    Lanes sums[R][W];
    for (int r = 0; r < R; r++)
        for (int u = 0; u < W; u++) sums[r][u] = all(0.0f);
    for (int d = 0; d < dim; d += 2) {
        Pairs key[W];
        for (int u = 0; u < W; u++) {
            key[u] = kept(load_pairs(keys[u] + d * UNIT));
            if constexpr (AHEAD) prefetch(ahead[u] + d * UNIT);
        }
        for (int r = 0; r < R; r++) {
            const Pairs query = all_pairs(queries + r * dim + d);
            for (int u = 0; u < W; u++) sums[r][u] = add_products(sums[r][u], key[u], query);
        }
    }
    for (int r = 0; r < R; r++)
        for (int u = 0; u < W; u++) store(scores + r * CHUNK + u * UNIT, sums[r][u]);
}

// sums = sums * decay + weights @ values for rows r < R and dimensions [0, 16 W). weights [R][CHUNK], values from
// dimension 0 on, sums [R][dim].
template <int R, int W, bool AHEAD>
inline void weigh(const bf16* weights, const bf16* const* values, const bf16* const* ahead, int first, int units,
                  int dim, const float* decay, float* sums) {
    Lanes sum[R][W];
    for (int r = 0; r < R; r++)
        for (int w = 0; w < W; w++) sum[r][w] = load(sums + r * dim + w * UNIT) * all(decay[r]);
    for (int u = 0; u < units; u++) {
        const bf16* unit = values[u] + first * 2;
        for (int pair = 0; pair < UNIT / 2; pair++) {
            Pairs value[W];
            for (int w = 0; w < W; w++) {
                const int at = (pair * dim + w * UNIT) * 2;
                value[w] = kept(load_pairs(unit + at));
                if constexpr (AHEAD) prefetch(ahead[u] + first * 2 + at);
            }
            for (int r = 0; r < R; r++) {
                const Pairs weight = all_pairs(weights + r * CHUNK + u * UNIT + pair * 2);
                for (int w = 0; w < W; w++) sum[r][w] = add_products(sum[r][w], value[w], weight);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int w = 0; w < W; w++) store(sums + r * dim + w * UNIT, sum[r][w]);
}

// The keys of a chunk that a row sees: [begin, end).
struct Seen {
    int begin;
    int end;
};

// Scores of keys that a row doesn't see, of those in [0, end), to such as have weight 0.
inline void hide(float* scores, Seen seen, int end) {
    constexpr float HIDDEN = -std::numeric_limits<float>::infinity();
    for (int at = seen.end / UNIT * UNIT; at < end; at += UNIT)
        store(scores + at, first_or(load(scores + at), std::clamp(seen.end - at, 0, UNIT), HIDDEN));
    std::fill(scores, scores + seen.begin, HIDDEN);
}

// How scores become exponents of 2.
struct Curve {
    float unit;  // times the score, or what `cap` made of it
    float cap;
    float inner;  // times the score, twice what the hyperbolic tangent is taken of
};

constexpr float LOG2_E = 1.44269504088896341f;

// scale, cap: as in AttentionStep.
inline Curve curve_of(float scale, float cap) {
    if (cap > 0) return {LOG2_E, cap, 2.0f * scale / cap};
    return {scale * LOG2_E, 0.0f, 0.0f};
}

// cap * tanh(score * inner / 2) for the scores in [0, end).
inline void flatten(float* scores, const Curve& curve, int end) {
    for (int at = 0; at < end; at += UNIT) {
        const Lanes grown = exp(load(scores + at) * all(curve.inner)) + all(1.0f);
        store(scores + at, (all(1.0f) - all(2.0f) / grown) * all(curve.cap));
    }
}

// R rows' scores of `units` units to weights 2^(score * unit - maximum), their sums added to `weight`. decay[r]: what
// earlier sums have to be multiplied with. An odd number of units is filled up with weights of 0.
template <int R, class SeenBy>
inline void soften(float* scores, int units, SeenBy seen, const Curve& curve, float* maximum, float* weight,
                   float* decay, bf16* weights) {
    const int end = (units + 1) / 2 * 2 * UNIT;
    alignas(64) float fall[LANES] = {};
    for (int r = 0; r < R; r++) {
        float* row = scores + r * CHUNK;
        if (curve.cap > 0) flatten(row, curve, end);
        const Seen part = seen(r);
        if (part.begin > 0 || part.end < end) hide(row, part, end);
        Lanes highest = load(row);
        for (int at = UNIT; at < end; at += UNIT) highest = max(load(row + at), highest);
        const float before = maximum[r];
        maximum[r] = std::max(before, largest_lane(highest) * curve.unit);
        fall[r] = before - maximum[r];
    }
    alignas(64) float decays[LANES];
    store(decays, power_of_two_below_one(load(fall)));
    const Pairs ones = rounded(all(1.0f), all(1.0f));
    for (int r = 0; r < R; r++) {
        decay[r] = decays[r];
        const Lanes rise = all(-maximum[r]);
        Lanes sum = load(weight + r * UNIT) * all(decays[r]);
        for (int at = 0; at < end; at += 2 * UNIT) {
            const float* row = scores + r * CHUNK + at;
            const Lanes first = coarse_power_of_two_below_one(fused(load(row), all(curve.unit), rise));
            const Lanes second = coarse_power_of_two_below_one(fused(load(row + UNIT), all(curve.unit), rise));
            const Pairs both = rounded(first, second);
            store(weights + r * CHUNK + at, both);
            sum = add_products(sum, both, ones);
        }
        store(weight + r * UNIT, sum);
    }
}

// R rows of a tile, one chunk. seen(r): the chunk's keys that row r sees. ahead: as many units, with AHEAD.
template <int R, bool AHEAD, class SeenBy>
inline void attend_chunk(const bf16* queries, const KeyChunk& chunk, const KeyChunk& ahead, int dim,
                         const Curve& curve, SeenBy seen, RowStates states) {
    int units = 0;
    for (int r = 0; r < R; r++) units = std::max(units, (seen(r).end + UNIT - 1) / UNIT);
    if (units == 0) return;
    alignas(64) float scores[R * CHUNK];
    alignas(64) bf16 weights[R * CHUNK];
    float decay[R];
    int u = 0;
    for (; u + MICRO_WIDTH <= units; u += MICRO_WIDTH)
        score<R, MICRO_WIDTH, AHEAD>(queries, dim, chunk.keys + u, ahead.keys + u, scores + u * UNIT);
    for (; u < units; u++) score<R, 1, AHEAD>(queries, dim, chunk.keys + u, ahead.keys + u, scores + u * UNIT);
    soften<R>(scores, units, seen, curve, states.maximum, states.weight, decay, weights);
    int d = 0;
    for (; d + MICRO_WIDTH * UNIT <= dim; d += MICRO_WIDTH * UNIT)
        weigh<R, MICRO_WIDTH, AHEAD>(weights, chunk.values, ahead.values, d, units, dim, decay, states.sum + d);
    for (; d < dim; d += UNIT) weigh<R, 1, AHEAD>(weights, chunk.values, ahead.values, d, units, dim, decay, states.sum + d);
}

template <bool AHEAD, class SeenBy>
inline void attend_chunk(int rows, const bf16* queries, const KeyChunk& chunk, const KeyChunk& ahead, int dim,
                         const Curve& curve, SeenBy seen, RowStates states) {
    switch (rows) {
        case 1: return attend_chunk<1, AHEAD>(queries, chunk, ahead, dim, curve, seen, states);
        case 2: return attend_chunk<2, AHEAD>(queries, chunk, ahead, dim, curve, seen, states);
        case 3: return attend_chunk<3, AHEAD>(queries, chunk, ahead, dim, curve, seen, states);
#if defined(TERCET_AVX512)
        case 4: return attend_chunk<4, AHEAD>(queries, chunk, ahead, dim, curve, seen, states);
        case 5: return attend_chunk<5, AHEAD>(queries, chunk, ahead, dim, curve, seen, states);
        case 6: return attend_chunk<6, AHEAD>(queries, chunk, ahead, dim, curve, seen, states);
#endif
    }
}

// Adds the sums over later keys to those over earlier ones.
inline void merge(RowStates later, int rows, int padded_dim, RowStates total) {
    for (int r = 0; r < rows; r++) {
        const float maximum = std::max(total.maximum[r], later.maximum[r]);
        const Lanes old = power_of_two_below_one(all(total.maximum[r] - maximum));
        const Lanes fresh = power_of_two_below_one(all(later.maximum[r] - maximum));
        for (int d = r * padded_dim; d < (r + 1) * padded_dim; d += UNIT)
            store(total.sum + d, load(total.sum + d) * old + load(later.sum + d) * fresh);
        const int at = r * UNIT;
        store(total.weight + at, load(total.weight + at) * old + load(later.weight + at) * fresh);
        total.maximum[r] = maximum;
    }
}

}  // namespace tercet
