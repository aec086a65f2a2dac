// The instruction set that this library is built for: exactly one of TERCET_AVX512, TERCET_AVX2 or neither is defined,
// with the first perhaps TERCET_AMX (kernels/cpu/build.py). A header chooses by it behind one small function of each op.
#pragma once

#include <cstdint>

#if defined(TERCET_AVX512) || defined(TERCET_AVX2)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // g++ 12 takes the header's own undefined registers for a mistake
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#define TERCET_EXPORT extern "C" __attribute__((visibility("default")))

namespace tercet {

// One spin of a waiting loop.
inline void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace tercet
