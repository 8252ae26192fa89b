// Threads that live as long as the process and sleep when there is nothing to do.
#pragma once

#include "step.h"

namespace octavo {

// Who waits: threads of this process, or also those of other processes that share the memory.
enum class Scope { process, machine };

// A number whose change threads wait for. They first spin for as long as a step usually makes them wait, because
// sleeping and waking takes ten times as long as a barrier, then let others run between two looks, and then sleep in
// the kernel (futex).
template <Scope kScope>
class Signal {
   public:
    uint32_t value() const { return value_.load(std::memory_order_acquire); }

    // Publishes the caller's writes to the waiting threads, and wakes them.
    void change();

    // Returns when the value is no longer `old`.
    void wait_while(uint32_t old);

   private:
    std::atomic<uint32_t> value_{0};
    std::atomic<uint32_t> num_sleepers_{0};
};

// A barrier in one cache line: with two threads it moves half as often as two lines would. Zeros are a valid barrier
// without a count.
template <Scope kScope>
class alignas(64) BarrierOf {
   public:
    // Only while nobody waits.
    void set_count(int64_t count) { count_ = count; }
    void wait();

   private:
    int64_t count_ = 1;
    std::atomic<int64_t> num_arrived_{0};
    Signal<kScope> all_arrived_;
};

// The barrier of a run's threads.
class Barrier : public BarrierOf<Scope::process> {};

// Calls `function(context, thread)` on `count` threads at once, the caller being thread 0, and returns when all have
// returned. There are fewer threads if the system refuses more, and only the caller while another thread of the process
// is in this function: results must not depend on the number of threads.
void run_on_threads(int64_t count, void (*function)(void* context, Thread thread), void* context);

}  // namespace octavo
