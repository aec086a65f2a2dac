// Draws a token from one row of logits: kernels/sampling.py, in C++, with the same result bit for bit.
//
// The order is the same: adjust, top-k, temperature, top-p, min-p, Gumbel-max. What is not the same is how much of a row
// is looked at: a token that can neither reach the nucleus nor win is never scaled, weighed or given noise.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>

#include "philox.h"
#include "row_search.h"
#include "written_out.h"

namespace tercet {

// One row's order, as kernels/cpu/sampling.py fills it in. Arrays may be null where their count is 0.
struct DrawOrder {
    const int32_t* tokens;  // [token_count], each below vocab; those from prompt_len on are output
    int64_t token_count, prompt_len;
    const int32_t* bias_ids;
    const float* biases;
    int64_t bias_count;
    const int32_t* banned_ids;
    int64_t banned_count;
    const uint32_t* mask;  // [mask_words]: a bit for each token that may be drawn, none behind the last word
    int64_t mask_words;    // -1: all may be drawn
    double repetition_penalty, presence_penalty, frequency_penalty;
    double temperature, top_p, min_score;  // min_score: ln of min_p, or -inf
    int64_t top_k;                         // 0: off
    uint64_t seed;
    int64_t position, choice;
    int64_t logprobs;  // -1: none; else how many of the likeliest
    int32_t* top_ids;  // out [logprobs]
    float* top_logits;
};

enum class Fault : int64_t { NONE, NOT_FINITE, NOTHING_ALLOWED };

struct DrawResult {
    int64_t token_id;
    Fault fault;
    double logit, highest;  // raw: of the token, and of the row
    int64_t mass;           // sum of the raw row's weights, where logprobs are asked for
    int64_t top_count;
};

// A thread's own memory. counts are 0 between rows.
struct DrawSpace {
    float *adjusted, *values, *peaks, *scratch;
    int32_t *counts, *ids, *order, *ranges;
    double* scores;
    int64_t* weights;

    static int64_t padded(int64_t vocab) { return (vocab + SPARE + BLOCK - 1) / BLOCK * BLOCK; }
    static int64_t bytes(int64_t vocab) { return padded(vocab) * (2 * 8 + 9 * 4); }

    // memory: [bytes(vocab)], zero at first.
    DrawSpace(char* memory, int64_t vocab) {
        const int64_t size = padded(vocab);
        scores = reinterpret_cast<double*>(memory);
        weights = reinterpret_cast<int64_t*>(scores + size);
        adjusted = reinterpret_cast<float*>(weights + size);
        values = adjusted + size;
        peaks = values + size;
        scratch = peaks + size;  // twice as long
        counts = reinterpret_cast<int32_t*>(scratch + 2 * size);
        ids = counts + size;
        order = ids + size;
        ranges = order + size;
    }
};

inline bool any_of(const Longs& mask) {
#if defined(TERCET_AVX512)
    return _mm512_test_epi64_mask(bits_of<__m512i>(mask), bits_of<__m512i>(mask)) != 0;
#else
    int64_t any = 0;
    for (int lane = 0; lane < EIGHT; lane++) any |= mask[lane];
    return any != 0;
#endif
}

inline Doubles load_doubles(const double* from) {
    Doubles value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}

// Eight logits; -inf in place of those behind `count`.
inline Doubles load_logits(const float* from, int count) {
    typedef float Eight __attribute__((vector_size(32)));
    Eight values = Eight{} - INFINITY;
    if (count >= EIGHT)
        __builtin_memcpy(&values, from, sizeof values);
    else
        for (int lane = 0; lane < count; lane++) values[lane] = from[lane];
    return __builtin_convertvector(values, Doubles);
}

// -- adjusting --------------------------------------------------------------------------------------------------------

inline float capped(float value) { return value > FLT_MAX ? FLT_MAX : value; }

inline void penalize_repetition(float* logits, const DrawOrder& order, int32_t* counts) {
    const float penalty = static_cast<float>(order.repetition_penalty);
    for (int64_t i = 0; i < order.token_count; i++) {
        const int32_t token = order.tokens[i];
        if (counts[token]++) continue;
        logits[token] = capped(logits[token] > 0 ? logits[token] / penalty : logits[token] * penalty);
    }
    for (int64_t i = 0; i < order.token_count; i++) counts[order.tokens[i]] = 0;
}

inline void penalize_presence_and_frequency(float* logits, const DrawOrder& order, int32_t* counts) {
    const float presence = static_cast<float>(order.presence_penalty);
    const float frequency = static_cast<float>(order.frequency_penalty);
    for (int64_t i = order.prompt_len; i < order.token_count; i++) counts[order.tokens[i]]++;
    for (int64_t i = order.prompt_len; i < order.token_count; i++) {
        const int32_t token = order.tokens[i];
        if (!counts[token]) continue;
        const float penalty = presence + frequency * static_cast<float>(counts[token]);
        logits[token] = capped(logits[token] - std::clamp(penalty, -FLT_MAX, FLT_MAX));
        counts[token] = 0;
    }
}

// -inf in place of what a grammar does not allow.
inline void forbid_masked(float* logits, int vocab, const DrawOrder& order) {
    for (int64_t start = 0; start < vocab; start += 32) {
        const int64_t word = start / 32;
        const uint32_t allowed = word < order.mask_words ? order.mask[word] : 0;
        if (allowed == UINT32_MAX) continue;
        const int count = static_cast<int>(std::min<int64_t>(32, vocab - start));
        for (int bit = 0; bit < count; bit++)
            if (!(allowed >> bit & 1)) logits[start + bit] = -INFINITY;
    }
}

// The row as it is, or its adjusted copy.
inline const float* adjust(const float* logits, int vocab, const DrawOrder& order, const DrawSpace& space) {
    const bool penalizes = order.presence_penalty != 0 || order.frequency_penalty != 0;
    const bool output = order.token_count > order.prompt_len;
    const bool repeats = order.repetition_penalty != 1;
    const bool masked = order.mask_words >= 0;
    if (!order.bias_count && !repeats && !(penalizes && output) && !order.banned_count && !masked) return logits;
    float* adjusted = space.adjusted;
    std::copy(logits, logits + vocab, adjusted);
    for (int64_t i = 0; i < order.bias_count; i++) adjusted[order.bias_ids[i]] += order.biases[i];
    for (int64_t i = 0; i < order.bias_count; i++) {
        float& logit = adjusted[order.bias_ids[i]];
        logit = capped(logit);
    }
    if (repeats) penalize_repetition(adjusted, order, space.counts);
    if (penalizes && output) penalize_presence_and_frequency(adjusted, order, space.counts);
    for (int64_t i = 0; i < order.banned_count; i++) adjusted[order.banned_ids[i]] = -INFINITY;
    if (masked) forbid_masked(adjusted, vocab, order);
    return adjusted;
}

// -- candidates -------------------------------------------------------------------------------------------------------

// ids and scores of `count` tokens; up to a whole vector the scores behind them are -inf.
struct Candidates {
    int32_t* ids;
    double* scores;
    int count;

    void pad() {
        for (int i = count; i % EIGHT; i++) {
            ids[i] = 0;
            scores[i] = -INFINITY;
        }
    }
};

// What may be needed of a row down to a score of -depth: a superset, whatever the rounding.
inline float cut_at(double depth, float highest, double temperature) {
    const double cut = highest - (depth + 0.01) * temperature;
    return cut < -FLT_MAX ? -FLT_MAX : std::nextafter(static_cast<float>(cut), -INFINITY);
}

inline void scale(const float* values, float highest, double temperature, Candidates& candidates) {
    const double top = highest;
    for (int i = 0; i < candidates.count; i++) candidates.scores[i] = (values[i] - top) / temperature;
    candidates.pad();
}

inline int64_t weigh(const Candidates& candidates, int64_t* weights) {
    Longs sum{};
    for (int i = 0; i < candidates.count; i += EIGHT) {
        const Longs weight = weights_of(load_doubles(candidates.scores + i));
        __builtin_memcpy(weights + i, &weight, sizeof weight);
        sum += weight;
    }
    int64_t total = 0;
    for (int lane = 0; lane < EIGHT; lane++) total += sum[lane];
    return total;
}

// Sum of the weights of a whole row.
inline int64_t weigh_row(const float* logits, int vocab, const float* peaks, float highest, double temperature) {
    const double top = highest;
    const float cut = cut_at(-WEIGHTLESS, highest, temperature);
    Longs sum{};
    for (int start = 0; start < vocab; start += BLOCK) {
        if (peaks[start / BLOCK] < cut) continue;
        for (int i = start; i < std::min(start + BLOCK, vocab); i += EIGHT) {
            sum += weights_of((load_logits(logits + i, vocab - i) - top) / temperature);
        }
    }
    int64_t total = 0;
    for (int lane = 0; lane < EIGHT; lane++) total += sum[lane];
    return total;
}

// The fewest likeliest candidates whose weights reach `needed` together. ranges, order: scratch, [candidates.count].
//
// They are sorted only where it matters: sums by range of score tell in which range `needed` is reached.
inline void keep_nucleus(Candidates& candidates, const int64_t* weights, double needed, int32_t* ranges,
                         int32_t* order) {
    constexpr int RANGES = 256;
    const double* scores = candidates.scores;
    double lowest = 0;
    for (int i = 0; i < candidates.count; i++) lowest = std::min(lowest, std::max(scores[i], WEIGHTLESS));
    const double ranges_per_score = lowest < 0 ? (RANGES - 1) / -lowest : 0;
    for (int i = 0; i < candidates.count; i++)  // the higher the score the lower its range
        ranges[i] = static_cast<int32_t>(-std::max(scores[i], WEIGHTLESS) * ranges_per_score);
    int64_t masses[RANGES] = {};
    for (int i = 0; i < candidates.count; i++) masses[ranges[i]] += weights[i];
    int64_t before = 0;
    int border = 0;
    while (border < RANGES - 1 && static_cast<double>(before + masses[border]) < needed) before += masses[border++];
    int bordering = 0;
    for (int i = 0; i < candidates.count; i++) {
        order[bordering] = i;
        bordering += ranges[i] == border;
    }
    std::sort(order, order + bordering,
              [&](int32_t a, int32_t b) { return scores[a] > scores[b] || (scores[a] == scores[b] && a < b); });
    int last = candidates.count - 1;
    for (int rank = 0; rank < bordering && static_cast<double>(before) < needed; rank++) {
        last = order[rank];
        before += weights[last];
    }
    const double lowest_kept = bordering ? scores[last] : -INFINITY;
    int kept = 0;
    for (int i = 0; i < candidates.count; i++) {
        if (!(scores[i] > lowest_kept || (scores[i] == lowest_kept && i <= last))) continue;
        candidates.ids[kept] = candidates.ids[i];
        candidates.scores[kept++] = scores[i];
    }
    candidates.count = kept;
    candidates.pad();
}

inline void keep_min_score(Candidates& candidates, double least) {
    int kept = 0;
    for (int i = 0; i < candidates.count; i++) {
        if (!(candidates.scores[i] >= least)) continue;
        candidates.ids[kept] = candidates.ids[i];
        candidates.scores[kept++] = candidates.scores[i];
    }
    candidates.count = kept;
    candidates.pad();
}

// Candidates after top-k, temperature, top-p and min-p: at least all those that may win the draw, and none that may not
// be drawn. The row's largest is always among them, with score 0.
inline Candidates find_candidates(const float* logits, int vocab, float highest, const DrawOrder& order,
                                  const DrawSpace& space) {
    const double temperature = order.temperature;
    Candidates found{space.ids, space.scores, 0};
    const auto look = [&](double depth) {
        found.count = collect(logits, vocab, space.peaks, cut_at(depth, highest, temperature), found.ids, space.values);
        scale(space.values, highest, temperature, found);
    };
    // A winner's score and noise are at least 0 and the lowest noise.
    const double winning = std::min(GUMBEL_HIGHEST - GUMBEL_LOWEST, -order.min_score);
    if (order.top_k) {
        found.count = collect_top_k(logits, vocab, space.peaks, order.top_k, -FLT_MAX, found.ids, space.values,
                                    space.scratch);
        scale(space.values, highest, temperature, found);
        if (order.top_p < 1) {
            const double needed = order.top_p * static_cast<double>(weigh(found, space.weights));
            keep_nucleus(found, space.weights, needed, space.ranges, space.order);
        }
    } else if (order.top_p < 1) {
        const int64_t mass = weigh_row(logits, vocab, space.peaks, highest, temperature);
        const double needed = order.top_p * static_cast<double>(mass);
        for (const double depth : {6.0, 12.0, -WEIGHTLESS}) {
            look(depth);
            if (static_cast<double>(weigh(found, space.weights)) >= needed) break;
        }
        keep_nucleus(found, space.weights, needed, space.ranges, space.order);
    } else {
        look(winning);
    }
    if (order.min_score > -INFINITY) keep_min_score(found, order.min_score);
    return found;
}

// -- the draw ---------------------------------------------------------------------------------------------------------

// Of the largest score + noise, the lowest id of equals.
class Winner {
public:
    explicit Winner(const NoiseKey& key) : key_(key) {}

    int32_t token_id() const { return token_id_; }
    double sum() const { return sum_; }

    Words words(const int32_t* ids) const {
        Words wide;
        for (int lane = 0; lane < EIGHT; lane++) wide[lane] = static_cast<uint32_t>(ids[lane]);
        return philox_words(wide, key_);
    }

    void try_all(const int32_t* ids, const Doubles& scores, const Words& words) {
        const Doubles sums = scores + gumbel_of(words);
        for (int lane = 0; lane < EIGHT; lane++) {
            if (sums[lane] < sum_ || (sums[lane] == sum_ && ids[lane] >= token_id_)) continue;
            sum_ = sums[lane];
            token_id_ = ids[lane];
        }
    }

private:
    NoiseKey key_;
    double sum_ = -100;  // below every sum of a token near the top, of which there is one
    int32_t token_id_ = INT32_MAX;
};

// Whether a token's noise may lift it to `sum`. It must be at least g = sum - score, so 1 - u <= -ln u <= exp(-g), which
// a power of two bounds from above.
inline Longs may_reach(const Doubles& scores, const Words& words, double sum) {
    const Longs possible = scores + GUMBEL_HIGHEST >= sum;
    Doubles short_by = possible ? scores - sum : eight(-100.0);
    short_by = short_by < 0.0 ? short_by : Doubles{};
    const Longs power = __builtin_convertvector(short_by * 1.4426950408889634, Longs);  // towards 0: rounds up
    const Doubles bound = bits_of<Doubles>((power + (1023 + 32)) << 52) * (1 + 1e-7);
    const Doubles missing = 4294967295.0 - __builtin_convertvector(words, Doubles);  // less than (1 - u) 2^32
    return missing <= bound;
}

// Gumbel-max over the candidates: the likeliest first, since what they reach spares most others their logarithms.
inline int32_t draw_token(const Candidates& candidates, const NoiseKey& key) {
    constexpr double NEAR = -5.0;
    Winner winner(key);
    const auto look = [&](int i, const Doubles& scores) {
        const Words words = winner.words(candidates.ids + i);
        if (any_of(may_reach(scores, words, winner.sum()))) winner.try_all(candidates.ids + i, scores, words);
    };
    for (int i = 0; i < candidates.count; i += EIGHT) {
        const Doubles scores = load_doubles(candidates.scores + i);
        if (any_of(scores >= NEAR)) look(i, scores);
    }
    for (int i = 0; i < candidates.count; i += EIGHT) {
        const Doubles scores = load_doubles(candidates.scores + i);
        if (!any_of(scores >= NEAR) && any_of(scores + GUMBEL_HIGHEST >= winner.sum())) look(i, scores);
    }
    return winner.token_id();
}

// -- one row ----------------------------------------------------------------------------------------------------------

inline int64_t find_top(const float* logits, int vocab, const DrawOrder& order, const DrawSpace& space) {
    const int found = collect_top_k(logits, vocab, space.peaks, order.logprobs, -INFINITY, space.ids, space.values,
                                    space.scratch);
    for (int i = 0; i < found; i++) space.order[i] = i;
    std::sort(space.order, space.order + found, [&](int32_t a, int32_t b) {
        return space.values[a] > space.values[b] || (space.values[a] == space.values[b] && a < b);
    });
    for (int i = 0; i < found; i++) {
        order.top_ids[i] = space.ids[space.order[i]];
        order.top_logits[i] = space.values[space.order[i]];
    }
    return found;
}

inline DrawResult draw_row(const float* logits, int vocab, const DrawOrder& order, const DrawSpace& space) {
    DrawResult result{};
    const Highest raw = find_highest(logits, vocab, space.peaks);
    if (!std::isfinite(raw.value)) {
        result.fault = Fault::NOT_FINITE;
        return result;
    }
    result.highest = raw.value;
    if (order.logprobs >= 0) result.mass = weigh_row(logits, vocab, space.peaks, raw.value, 1.0);
    if (order.logprobs > 0) result.top_count = find_top(logits, vocab, order, space);
    const float* adjusted = adjust(logits, vocab, order, space);
    const Highest likeliest = adjusted == logits ? raw : find_highest(adjusted, vocab, space.peaks);
    if (!std::isfinite(likeliest.value)) {
        result.fault = Fault::NOTHING_ALLOWED;
        return result;
    }
    result.token_id = likeliest.id;
    if (order.temperature != 0) {
        const Candidates candidates = find_candidates(adjusted, vocab, likeliest.value, order, space);
        const NoiseKey key{order.seed, static_cast<uint32_t>(order.position), static_cast<uint32_t>(order.choice)};
        result.token_id = draw_token(candidates, key);
    }
    result.logit = logits[result.token_id];
    return result;
}

}  // namespace tercet
