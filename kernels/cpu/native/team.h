// A team of threads that work off phases: `each(chunks, work)` calls work(chunk, thread) once for every chunk.
//
// A phase ends when its chunks are done, not when its threads have come. The caller is thread 0 and works like the
// others; a helper that the kernel has put aside is waited for only while it holds an unfinished chunk, since the others
// take what it left.
//
// Each thread has a word of its own, (epoch, end, next): the chunks [next, end) of this epoch that nobody has taken yet.
// A chunk is taken by a compare-and-swap of the whole word, one's own first, then the others'. As the epoch is part of
// the word, a late thread can't take a chunk of a later phase with what it read of an earlier one; and since a phase
// doesn't end while a chunk is untaken or unfinished, what a successful swap refers to (work_, context_) is this
// phase's.
//
// One caller at a time. Helpers spin for a moment between phases, then sleep: an idle team takes no CPU.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

#include "isa.h"

namespace tercet {

class Team {
public:
    // cores: of each thread, or empty: the kernel places them. Throws std::system_error if a thread can't be made.
    explicit Team(int threads, const std::vector<int>& cores = {})
        : size_(std::max(threads, 1)), words_(std::make_unique<Word[]>(size_)), cores_(cores) {
        try {
            for (int thread = 1; thread < size_; thread++)
                helpers_.emplace_back([this, thread] { help(thread); });
        } catch (...) {
            end();
            throw;
        }
    }

    ~Team() { end(); }

    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }

    // work(int chunk, int thread), thread < size(). Returns when all chunks are done; what they wrote is visible.
    template <class Work>
    void each(int chunks, Work&& work) {
        if (size_ == 1 || chunks <= 1) {
            for (int chunk = 0; chunk < chunks; chunk++) work(chunk, 0);
            return;
        }
        using Plain = std::remove_reference_t<Work>;
        for (int first = 0; first < chunks; first += MAX_CHUNKS) {
            auto shifted = [&work, first](int chunk, int thread) { work(first + chunk, thread); };
            run(std::min(chunks - first, MAX_CHUNKS), &call<decltype(shifted)>, &shifted);
        }
        static_assert(std::is_invocable_v<Plain, int, int>);
    }

private:
    using Call = void (*)(void* context, int chunk, int thread);
    static constexpr int MAX_CHUNKS = 0xffff;
    static constexpr int SPINS_OF_HELPER = 2000;  // some tens of microseconds: longer than what lies between two phases
    static constexpr int SPINS_OF_CALLER = 2000;

    struct alignas(128) Word {
        std::atomic<uint64_t> value{0};
    };

    template <class Work>
    static void call(void* context, int chunk, int thread) {
        (*static_cast<Work*>(context))(chunk, thread);
    }

    static constexpr uint64_t packed(uint32_t epoch, uint32_t end, uint32_t next) {
        return uint64_t{epoch} << 32 | end << 16 | next;
    }
    static constexpr uint32_t epoch_of(uint64_t word) { return word >> 32; }

    void run(int chunks, Call work, void* context) {
        work_ = work;
        context_ = context;
        done_.store(0, std::memory_order_relaxed);
        epoch_++;
        for (int thread = size_ - 1; thread >= 0; thread--) {
            const uint32_t start = int64_t{chunks} * thread / size_, end = int64_t{chunks} * (thread + 1) / size_;
            // Sequentially consistent, as is the look at asleep_: a helper that goes to sleep sees the word, or is seen.
            words_[thread].value.store(packed(epoch_, end, start));
        }
        wake();
        const uint32_t mine = work_off(0, epoch_);
        if (mine) done_.fetch_add(mine, std::memory_order_acq_rel);
        await(static_cast<uint32_t>(chunks));
    }

    // Takes chunks of this epoch until there are none; how many this thread did.
    uint32_t work_off(int thread, uint32_t epoch) {
        uint32_t count = 0;
        for (int step = 0; step < size_; step++) {
            auto& word = words_[(thread + step) % size_].value;
            uint64_t seen = word.load(std::memory_order_acquire);
            while (epoch_of(seen) == epoch && (seen & 0xffff) < (seen >> 16 & 0xffff)) {
                if (!word.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
                work_(context_, static_cast<int>(seen & 0xffff), thread);
                count++;
                seen = word.load(std::memory_order_acquire);
            }
        }
        return count;
    }

    void await(uint32_t chunks) {
        for (int spin = 0; spin < SPINS_OF_CALLER; spin++) {
            if (done_.load(std::memory_order_acquire) == chunks) return;
            pause_cpu();
        }
        waiting_.store(true);
        for (uint32_t done = done_.load(); done != chunks; done = done_.load()) done_.wait(done);
        waiting_.store(false);
    }

    void help(int thread) {
        place(thread);
        uint32_t epoch = 0;
        while (true) {
            epoch = next_epoch(thread, epoch);
            if (ending_.load(std::memory_order_acquire)) return;
            const uint32_t count = work_off(thread, epoch);
            if (count) {
                done_.fetch_add(count);
                if (waiting_.load()) done_.notify_one();
            }
        }
    }

    // Waits until the thread's word has another epoch than the one it was through with.
    uint32_t next_epoch(int thread, uint32_t old) {
        auto& word = words_[thread].value;
        for (int spin = 0; spin < SPINS_OF_HELPER; spin++) {
            const uint32_t epoch = epoch_of(word.load(std::memory_order_acquire));
            if (epoch != old) return epoch;
            pause_cpu();
        }
        asleep_.fetch_add(1);
        uint32_t epoch;
        while (true) {
            const uint32_t rung = bell_.load();
            epoch = epoch_of(word.load());
            if (epoch != old || ending_.load()) break;
            bell_.wait(rung);
        }
        asleep_.fetch_sub(1);
        return epoch;
    }

    void wake() {
        if (asleep_.load() == 0) return;
        bell_.fetch_add(1);
        bell_.notify_all();
    }

    void end() {
        ending_.store(true);
        epoch_++;
        for (int thread = 0; thread < size_; thread++) words_[thread].value.store(packed(epoch_, 0, 0));
        bell_.fetch_add(1);
        bell_.notify_all();
        for (auto& helper : helpers_) helper.join();
        helpers_.clear();
    }

    void place(int thread) {
#if defined(__linux__)
        if (cores_.empty()) return;
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cores_[thread % cores_.size()], &set);
        pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // refused: the thread runs where the kernel likes
#else
        (void)thread;
#endif
    }

    const int size_;
    std::unique_ptr<Word[]> words_;
    std::vector<int> cores_;
    std::vector<std::thread> helpers_;
    // Written by the caller between phases, read by those who hold a chunk.
    Call work_ = nullptr;
    void* context_ = nullptr;
    uint32_t epoch_ = 0;
    alignas(128) std::atomic<uint32_t> done_{0};
    std::atomic<bool> waiting_{false};
    alignas(128) std::atomic<uint32_t> asleep_{0};
    std::atomic<uint32_t> bell_{0};
    std::atomic<bool> ending_{false};
};

}  // namespace tercet
