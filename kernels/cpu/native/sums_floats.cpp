#include <array>
#include <utility>

#include "floats.h"
#include "sums.h"

namespace tercet {

template <Format F, int... I>
constexpr std::array<AddUpFloats, TILE> float_widths(std::integer_sequence<int, I...>) {
    return {add_up_floats<F, I + 1>...};
}
template <Format F>
constexpr auto float_widths() {
    return float_widths<F>(std::make_integer_sequence<int, widest(F)>());
}

const AddUpFloats* float_sums(Format format) {
    static constexpr std::array<AddUpFloats, TILE> SUMS[] = {
        float_widths<FLOATS>(),
        float_widths<FLOATS_HALF>(),
        float_widths<FLOATS_BRAIN>(),
    };
    return SUMS[format - FLOATS].data();
}

}  // namespace tercet
