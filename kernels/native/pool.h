// Threads that live as long as the process and sleep when there is nothing to do.
#pragma once

#include "step.h"

namespace octavo {

// Where the threads of one run wait for each other.
class Barrier {
   public:
    explicit Barrier(int64_t count) : count_(count), waiting_(0), round_(0) {}
    void wait();

   private:
    int64_t count_;
    std::atomic<int64_t> waiting_;
    std::atomic<uint32_t> round_;
};

// Calls `function(context, thread)` on `count` threads at once, the caller's being number 0, and returns when all
// have returned. One run at a time.
void run_on_threads(int64_t count, void (*function)(void* context, Thread thread), void* context);

}  // namespace octavo
