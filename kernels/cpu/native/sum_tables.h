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

template <Format F, int... I>
constexpr std::array<AddUp, TILE> integer_widths(std::integer_sequence<int, I...>) {
    return {add_up<LAYOUTS[F], I + 1>...};
}
template <Format F>
constexpr auto integer_widths() {
    return integer_widths<F>(std::make_integer_sequence<int, widest(F)>());
}

}  // namespace tercet
