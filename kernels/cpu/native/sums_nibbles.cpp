#include "sum_tables.h"

namespace tercet {

const AddUp* nibble_sums(Format format, int planes) {
    static constexpr std::array<AddUpWidths, MOST_PLANES> SUMS[] = {
        integer_widths<NIBBLES_HALF>(),
        integer_widths<NIBBLES_AFFINE_HALF>(),
        integer_widths<NIBBLES_AFFINE>(),
    };
    return SUMS[format][planes - 1].data();
}

}  // namespace tercet
