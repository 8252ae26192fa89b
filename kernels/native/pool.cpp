// The thread pool: see pool.h.
#include "pool.h"

#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {
namespace {

constexpr int kSpins = 2000;

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

// Returns when `value` is no longer `old`: spins for some microseconds, then sleeps.
void wait_while(const std::atomic<uint32_t>& value, uint32_t old) {
    for (int i = 0; i < kSpins; ++i) {
        if (value.load(std::memory_order_acquire) != old) return;
        pause();
    }
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

struct Pool {
    std::vector<std::thread> threads;
    std::atomic<uint32_t> run{0};
    int64_t count = 0;
    void (*function)(void*, Thread) = nullptr;
    void* context = nullptr;
    Barrier* barrier = nullptr;
};

Pool& pool() {
    static Pool* const instance = new Pool;  // never destroyed: its threads end with the process
    return *instance;
}

void serve(int64_t index, uint32_t seen) {
    Pool& shared = pool();
    for (;;) {
        wait_while(shared.run, seen);
        seen = shared.run.load(std::memory_order_acquire);
        if (index >= shared.count) continue;
        shared.function(shared.context, Thread{index, shared.count, nullptr, shared.barrier});
        shared.barrier->wait();
    }
}

}  // namespace

void Barrier::wait() {
    const uint32_t round = round_.load(std::memory_order_acquire);
    if (waiting_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
        waiting_.store(0, std::memory_order_relaxed);
        round_.fetch_add(1, std::memory_order_release);
        round_.notify_all();
    } else {
        wait_while(round_, round);
    }
}

void run_on_threads(int64_t count, void (*function)(void*, Thread), void* context) {
    if (count <= 1) {
        Barrier alone(1);
        function(context, Thread{0, 1, nullptr, &alone});
        return;
    }
    Pool& shared = pool();
    static Barrier* barrier = nullptr;
    if (shared.count != count) {
        delete barrier;
        barrier = new Barrier(count);
    }
    shared.count = count;
    shared.function = function;
    shared.context = context;
    shared.barrier = barrier;
    while (static_cast<int64_t>(shared.threads.size()) < count - 1)
        shared.threads.emplace_back(serve, static_cast<int64_t>(shared.threads.size()) + 1, shared.run.load());
    shared.run.fetch_add(1, std::memory_order_release);
    shared.run.notify_all();
    function(context, Thread{0, count, nullptr, barrier});
    barrier->wait();
}

}  // namespace octavo
