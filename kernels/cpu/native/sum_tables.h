// Tables of `add_up` for every number of rows, to be instantiated in one place each.
#pragma once

#include <array>
#include <utility>

#include "sums.h"

#if defined(TERCET_AVX512)
#include "integers_avx512.h"
#elif defined(TERCET_AVX2)
#include "integers_avx2.h"
#else
#include "integers_generic.h"
#endif

namespace tercet {

using AddUpWidths = std::array<AddUp, TILE>;

template <Format F, int P, int... I>
constexpr AddUpWidths integer_widths(std::integer_sequence<int, I...>) {
    return {add_up<LAYOUTS[F], P, I + 1>...};
}
// [planes - 1]
template <Format F>
constexpr std::array<AddUpWidths, MOST_PLANES> integer_widths() {
    constexpr auto widths = std::make_integer_sequence<int, widest(F)>();
    return {integer_widths<F, 1>(widths), integer_widths<F, 2>(widths)};
}

}  // namespace tercet
