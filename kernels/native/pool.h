// Threads that live as long as the process and sleep when there is nothing to do.
#pragma once

#include "step.h"

namespace octavo {

// A number that threads wait for to change. They spin for as long as a step usually leaves them waiting, because
// to fall asleep and be woken takes ten times as long as a barrier, and then sleep in the kernel (futex).
class Signal {
   public:
    uint32_t value() const { return value_.load(std::memory_order_acquire); }

    // Makes what the caller has written visible to those who wait, and wakes them.
    void change();

    // Returns when the value is no longer `old`.
    void wait_while(uint32_t old);

   private:
    std::atomic<uint32_t> value_{0};
    std::atomic<uint32_t> num_sleepers_{0};
};

// Where the threads of one run wait for each other. One cache line: with two threads it moves half as often as two would.
class alignas(64) Barrier {
   public:
    // Only while nobody waits.
    void set_count(int64_t count) { count_ = count; }
    void wait();

   private:
    int64_t count_ = 1;
    std::atomic<int64_t> num_arrived_{0};
    Signal all_arrived_;
};

// Calls `function(context, thread)` on `count` threads at once, the caller's being number 0, and returns when all
// have returned. The threads are fewer where the system gives no more, and the caller's is the only one while
// another thread of the process is in here: what is computed must not depend on their number.
void run_on_threads(int64_t count, void (*function)(void* context, Thread thread), void* context);

}  // namespace octavo
