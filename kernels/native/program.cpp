// Runs programs: lists of operations that all threads of the pool walk through together.
//
// Python makes the list; each entry is a function of the library and a pointer to its arguments
// (`kernels/native/program.py` mirrors the structures). Does not own threads, buffers or arguments.
#include <chrono>

#include "pool.h"
#include "step.h"

namespace octavo {

void Thread::wait_for_all() const { barrier->wait(); }

namespace {

using Function = void (*)(const void* args, const Step* step, Thread* thread);

// The weights of a product: panels of equal size. With few rows, each thread reads an equal share of the half panels
// (`Product::few_rows`).
struct Panels {
    const char* begin;
    int64_t count;
    int64_t panel_bytes;
};

// How much a waiting thread prefetches: a quarter of a usual L2 cache. A wait is rarely long enough for more.
constexpr int64_t kAheadBytes = 256 << 10;
// Larger steps are limited by arithmetic, not by memory.
constexpr int64_t kMaxAheadRows = 32;

struct Operation {
    Function function;
    const void* args;
    int64_t waits;  // whether all threads must be done with it before the next one begins
    Panels next;    // weights of the next product; 0 panels: unknown
};

struct Program {
    const Operation* operations;
    int64_t num_operations;
    std::atomic<int64_t>* counters;  // one per operation: what Thread::take counts
    int64_t* nanoseconds;            // one per operation, added to; null: do not measure
};

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// The part of a product's weights that a thread reads first.
Ahead ahead_of(const Panels& panels, const Thread& thread) {
    const Range halves = thread.share(2 * panels.count);
    const char* line = panels.begin + halves.begin / 2 * panels.panel_bytes;
    const char* end = panels.begin + (halves.end + 1) / 2 * panels.panel_bytes;
    return {line, line + std::min<int64_t>(end - line, kAheadBytes)};
}

Ahead walk(const Program& program, const Step& step, Thread thread) {
    const bool prefetches = step.num_rows <= kMaxAheadRows;
    const char* next = nullptr;
    Ahead ahead;
    int64_t start_ns = 0;
    const bool measures = program.nanoseconds != nullptr && thread.index == 0;
    if (measures) start_ns = now_ns();
    for (int64_t i = 0; i < program.num_operations; ++i) {
        const Operation& operation = program.operations[i];
        thread.next_item = &program.counters[i];
        operation.function(operation.args, &step, &thread);
        if (prefetches && operation.next.begin != next) {
            next = operation.next.begin;
            ahead = ahead_of(operation.next, thread);
        }
        if (operation.waits) thread.barrier->wait(&ahead);
        if (measures) {
            const int64_t end_ns = now_ns();
            program.nanoseconds[i] += end_ns - start_ns;
            start_ns = end_ns;
        }
    }
    return ahead;
}

}  // namespace
}  // namespace octavo

// Runs the whole program over the step on `num_threads` threads, the caller's included. Returns when all is done.
extern "C" void octavo_run(const octavo::Program* program, const octavo::Step* step, int64_t num_threads) {
    using namespace octavo;
    for (int64_t i = 0; i < program->num_operations; ++i) program->counters[i].store(0, std::memory_order_relaxed);
    struct Call {
        const Program* program;
        const Step* step;
    } call{program, step};
    run_on_threads(
        num_threads,
        [](void* context, Thread thread) {
            const Call& call = *static_cast<Call*>(context);
            return walk(*call.program, *call.step, thread);
        },
        &call);
}
