// The sums by tiles, and whether this machine lets a process use them.
#include "tiles.h"

#if defined(TERCET_AMX)

#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>

#include "integers_amx.h"

namespace tercet {

// [planes - 1][more planes of rows than a tile has]
using TiledKinds = std::array<std::array<AddUpTiles, 2>, MOST_PLANES>;

template <Format F>
constexpr TiledKinds tiled_kinds() {
    constexpr IntegerLayout L = LAYOUTS[F];
    return {{{add_up_tiles<L, 1, false>, nullptr}, {add_up_tiles<L, 2, false>, add_up_tiles<L, 2, true>}}};
}

AddUpTiles tiled_sums(Format format, int planes, int width) {
    static constexpr TiledKinds SUMS[] = {
        tiled_kinds<NIBBLES_HALF>(),      tiled_kinds<NIBBLES_AFFINE_HALF>(), tiled_kinds<NIBBLES_AFFINE>(),
        tiled_kinds<BYTES_HALF>(),        tiled_kinds<BYTES_AFFINE_HALF>(),   tiled_kinds<BYTES_AFFINE>(),
        TiledKinds{},  // BYTES_SIXTEENS
        tiled_kinds<BYTES_ROWS>(),
    };
    return SUMS[format][planes - 1][width * planes > TILED_PLANES];
}

}  // namespace tercet

namespace {

// In a child of fork: an instruction that the machine refuses ends the child.
[[noreturn]] void try_tiles() {
    const rlimit none{0, 0};
    setrlimit(RLIMIT_CORE, &none);
    signal(SIGILL, SIG_DFL);
    signal(SIGSEGV, SIG_DFL);
    alignas(64) int32_t sums[256];
    alignas(64) int8_t ones[512];
    for (int8_t& one : ones) one = 1;
    {
        const tercet::Tiles tiles(true);
        _tile_zero(0);
        _tile_loadd(4, ones, 32);
        _tile_loadd(6, ones, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_stored(0, sums, 64);
    }
    for (const int32_t sum : sums)
        if (sum != 32) _exit(1);
    _exit(0);
}

}  // namespace

// 1 if the kernel grants this process tiles and they work, which is tried in a child. Before the first product.
TERCET_EXPORT int tercet_tiles_work() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) != 0) return 0;
    const pid_t child = fork();
    if (child == 0) try_tiles();
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child) return 0;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

#endif
