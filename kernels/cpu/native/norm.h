// RMS norm of one row (arXiv:1910.07467): x / sqrt(mean(x^2) + eps) * weight.
#pragma once

#include "lanes.h"

namespace tercet {

// out may be x. Squares are summed in 16 lanes, column c in lane c % 16, then as `sum` does.
inline void rms_norm(const float* x, const float* weight, float eps, int cols, float* out) {
    Lanes squares = all(0.0f);
    int c = 0;
    for (; c + LANES <= cols; c += LANES) {
        const Lanes part = load(x + c);
        squares = fma(part, part, squares);
    }
    if (c < cols) {
        const Lanes part = load(x + c, cols - c);
        squares = fma(part, part, squares);
    }
    const Lanes scale = all(1.0f / std::sqrt(sum(squares) / static_cast<float>(cols) + eps));
    for (c = 0; c + LANES <= cols; c += LANES) store(out + c, load(x + c) * scale * load(weight + c));
    if (c < cols) store(out + c, load(x + c, cols - c) * scale * load(weight + c, cols - c), cols - c);
}

}  // namespace tercet
