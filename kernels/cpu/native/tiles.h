// AMX: tiles of 16 x 64 bytes, and the sums of a panel of integers with the rows of one tile by them.
//
// A tile of activations is sixteen planes of rows, 32 columns each, as QuantizedTile has them one after the other: eight
// rows of two planes, or sixteen of one. A tile of weights is a group's 8 steps, as a panel has them. Their product is
// whole, so what is made of it by the operations of integers_avx512.h, in that order, has the same bits.
// Of fewer rows the tile's last planes are what lies behind them (QuantizedRows::bytes has room), and are not looked at.
#pragma once

#include "sums.h"

namespace tercet {

#if defined(TERCET_AMX)

// A thread's tiles, while this object lives: 0 to 3 sums, 4 and 5 activations, 6 and 7 weights. Only where
// tercet_tiles_work has said so.
class Tiles {
public:
    explicit Tiles(bool wanted) : loaded_(wanted) {
        if (!loaded_) return;
        Shape shape{};
        shape.palette = 1;
        for (int i = 0; i < 6; i++) shape.rows[i] = 16, shape.row_bytes[i] = i < 4 ? 64 : GROUP;
        for (int i = 6; i < 8; i++) shape.rows[i] = GROUP / 4, shape.row_bytes[i] = 64;
        // Not _tile_loadconfig, which g++ tells to read a pointer's size only: the rest may then not be in memory yet.
        asm volatile("ldtilecfg %0" : : "m"(shape));
    }
    ~Tiles() {
        if (loaded_) _tile_release();
    }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

private:
    struct alignas(64) Shape {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    };
    const bool loaded_;
};

// Planes of rows from which on tiles take less time. Sums of sixteen columns have no tiles of their own.
constexpr int LEAST_TILED = 8;

// Whether some tile of so many rows may be multiplied by tiles.
inline bool want_tiles(const Matrix& matrix, int rows) { return matrix.planes && rows * matrix.planes >= LEAST_TILED; }

constexpr bool has_tiled_sums(Format format) { return is_integer(format) && format != BYTES_SIXTEENS; }
inline bool is_tiled(Format format, const QuantizedTile& x) {
    return has_tiled_sums(format) && x.width * x.planes >= LEAST_TILED;
}

// sums [x.width][PANEL].
using AddUpTiles = void (*)(const uint8_t* panel, int groups, const QuantizedTile& x, float* sums);

AddUpTiles tiled_sums(Format format, int planes, int width);

#else

class Tiles {
public:
    explicit Tiles(bool) {}
    ~Tiles() {}
};
inline bool want_tiles(const Matrix&, int) { return false; }

#endif

}  // namespace tercet
