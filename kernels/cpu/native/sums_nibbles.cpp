#include "sum_tables.h"

namespace tercet {

const AddUp* nibble_sums(Format format) {
    static constexpr std::array<AddUp, TILE> SUMS[] = {
        integer_widths<NIBBLES_HALF>(),
        integer_widths<NIBBLES_AFFINE_HALF>(),
        integer_widths<NIBBLES_AFFINE>(),
    };
    return SUMS[format].data();
}

}  // namespace tercet
