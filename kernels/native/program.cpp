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

struct Operation {
    Function function;
    const void* args;
    int64_t waits;  // whether all threads must be done with it before the next one begins
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

void walk(const Program& program, const Step& step, Thread thread) {
    int64_t start_ns = 0;
    const bool measures = program.nanoseconds != nullptr && thread.index == 0;
    if (measures) start_ns = now_ns();
    for (int64_t i = 0; i < program.num_operations; ++i) {
        const Operation& operation = program.operations[i];
        thread.next_item = &program.counters[i];
        operation.function(operation.args, &step, &thread);
        if (operation.waits) thread.wait_for_all();
        if (measures) {
            const int64_t end_ns = now_ns();
            program.nanoseconds[i] += end_ns - start_ns;
            start_ns = end_ns;
        }
    }
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
            walk(*call.program, *call.step, thread);
        },
        &call);
}
