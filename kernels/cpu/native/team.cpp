#include "team.h"

#include <atomic>
#include <cstdint>
#include <exception>

using tercet::Team;

// cores: of each thread, or null. Returns null if the threads can't be made.
TERCET_EXPORT Team* tercet_team_new(int threads, const int* cores, int core_count) {
    try {
        return new Team(threads, std::vector<int>(cores, cores + core_count));
    } catch (const std::exception&) {
        return nullptr;
    }
}

TERCET_EXPORT void tercet_team_delete(Team* team) { delete team; }

// For tests and benchmarks: phases of so many chunks, each of which adds its number to a sum and turns `spins` times.
// Returns the sum: chunks (chunks - 1) / 2 a phase if every chunk was done once.
TERCET_EXPORT uint64_t tercet_team_count(Team* team, int phases, int chunks, int spins) {
    std::atomic<uint64_t> sum{0};
    for (int phase = 0; phase < phases; phase++)
        team->each(chunks, [&](int chunk, int) {
            for (int spin = 0; spin < spins; spin++) tercet::pause_cpu();
            sum.fetch_add(chunk, std::memory_order_relaxed);
        });
    return sum.load();
}
