#include "sum_tables.h"

namespace tercet {

const AddUp* byte_sums(Format format, int planes) {
    static constexpr std::array<AddUpWidths, MOST_PLANES> SUMS[] = {
        integer_widths<BYTES_HALF>(),
        integer_widths<BYTES_AFFINE_HALF>(),
        integer_widths<BYTES_AFFINE>(),
        integer_widths<BYTES_SIXTEENS>(),
        integer_widths<BYTES_ROWS>(),
    };
    return SUMS[format - BYTES_HALF][planes - 1].data();
}

}  // namespace tercet
