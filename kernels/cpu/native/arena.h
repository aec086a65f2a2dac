// Cuts one buffer into arrays, each aligned to a cache line. Without a buffer it only counts.
#pragma once

#include <cstdint>

namespace tercet {

class Arena {
public:
    explicit Arena(void* buffer) : start_(static_cast<uint8_t*>(buffer)) {}

    template <class T>
    T* take(int64_t count) {
        T* at = start_ ? reinterpret_cast<T*>(start_ + used_) : nullptr;
        used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
        return at;
    }
    int64_t used() const { return used_; }

private:
    uint8_t* start_;
    int64_t used_ = 0;
};

}  // namespace tercet
