// The gate of the MLP (arXiv:2002.05202): silu(gate) * up, where silu(x) = x / (1 + e^-x).
#pragma once

#include "lanes.h"

namespace tercet {

inline Lanes silu_mul(Lanes gate, Lanes up) { return gate / (all(1.0f) + exp(all(0.0f) - gate)) * up; }

inline void silu_mul(const float* gate, const float* up, int cols, float* out) {
    int c = 0;
    for (; c + LANES <= cols; c += LANES) store(out + c, silu_mul(load(gate + c), load(up + c)));
    if (c < cols) store(out + c, silu_mul(load(gate + c, cols - c), load(up + c, cols - c)), cols - c);
}

}  // namespace tercet
