// Threads that live as long as the process and sleep when there is nothing to do.
#pragma once

#include "step.h"

namespace octavo {

// The threads that may wait: those of this process, or also those of other processes that share the memory.
enum class Scope { process, machine };

// Memory that a thread will read soon. While the thread waits, it prefetches the lines into its L2 cache, because the
// memory bus would be idle otherwise. The addresses need not be valid: prefetches never fault.
struct Ahead {
    const char* line = nullptr;
    const char* end = nullptr;

    // Prefetches the next line. Returns false if none is left.
    bool fetch_line() {
        if (line >= end) return false;
        __builtin_prefetch(line, 0, 2);
        line += 64;
        return true;
    }
};

// A number that threads can wait on for a change. A waiting thread first spins for as long as a step usually takes,
// because sleeping and waking takes ten times as long as a barrier. Then it yields between two looks, and finally it
// sleeps in the kernel (futex).
template <Scope kScope>
class Signal {
   public:
    uint32_t value() const { return value_.load(std::memory_order_acquire); }

    // Publishes the caller's writes to the waiting threads, and wakes them.
    void change();

    // Returns when the value is no longer `old`. Prefetches `ahead` meanwhile, unless it is null.
    void wait_while(uint32_t old, Ahead* ahead = nullptr);

   private:
    std::atomic<uint32_t> value_{0};
    std::atomic<uint32_t> num_sleepers_{0};
};

// A barrier in one cache line, which with two threads moves half as often as two lines would. Zeroed memory is a valid
// barrier without a count.
template <Scope kScope>
class alignas(64) BarrierOf {
   public:
    // Call only while no thread waits.
    void set_count(int64_t count) { count_ = count; }
    void wait(Ahead* ahead = nullptr);

   private:
    int64_t count_ = 1;
    std::atomic<int64_t> num_arrived_{0};
    std::atomic<int32_t> core_of_waiting_{0};  // 1 + the core of the thread that arrived last; 0: none in this round
    Signal<kScope> all_arrived_;
};

// The barrier of a run's threads.
class Barrier : public BarrierOf<Scope::process> {};

// Calls `function(context, thread)` on `count` threads at once, with the caller as thread 0, and returns when all have
// returned. A call returns the memory that its thread prefetches while it waits for the next run. Fewer threads run if
// the system refuses more, and only the caller runs while another thread of the process is in this function. So results
// must not depend on the number of threads.
void run_on_threads(int64_t count, Ahead (*function)(void* context, Thread thread), void* context);

}  // namespace octavo
