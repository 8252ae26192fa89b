// Drives the thread pool through everything it promises; ends with code 0, or says what was wrong.
//
// A program of its own, so that it can run under ThreadSanitizer (scripts/check_native). Its argument is the number of
// rounds. Tests no operation.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "native/pool.h"

extern "C" void octavo_run(const void* program, const octavo::Step* step, int64_t num_threads);

namespace {

using octavo::Ahead;
using octavo::run_on_threads;
using octavo::Thread;

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "pool_stress: %s\n", what);
    std::exit(1);
}

// Each thread writes where only it may, waits, and reads what the others wrote: with too few threads, two of one
// number, or a barrier that lets one through, a sum is wrong (or ThreadSanitizer sees the race).
struct Ring {
    int64_t values[16] = {};
    int64_t num_calls[16] = {};
    int64_t num_rounds = 0;
};

Ahead walk_ring(void* context, Thread thread) {
    Ring& ring = *static_cast<Ring*>(context);
    ring.num_calls[thread.index] += 1;
    for (int64_t round = 0; round < ring.num_rounds; ++round) {
        ring.values[thread.index] += 1;
        thread.wait_for_all();
        for (int64_t i = 0; i < thread.count; ++i)
            require(ring.values[i] == round + 1, "a barrier let a thread through");
        thread.wait_for_all();
    }
    // The ring is gone when the threads prefetch this.
    return {reinterpret_cast<const char*>(&ring), reinterpret_cast<const char*>(&ring + 1)};
}

void check_runs(int64_t num_rounds) {
    uint32_t random = 1;
    for (int64_t run = 0; run < num_rounds; ++run) {
        random = random * 1664525u + 1013904223u;
        const int64_t count = 1 + (random >> 16) % 5;
        Ring ring;
        ring.num_rounds = 1 + (random >> 24) % 8;
        run_on_threads(count, walk_ring, &ring);
        for (int64_t i = 0; i < 16; ++i)
            require(ring.num_calls[i] == (i < count ? 1 : 0), "a thread was not called, or twice, or too many were");
        if (run % 64 == 0) usleep(300);  // long enough for all to fall asleep
    }
}

void check_idle_costs_nothing() {
    Ring ring;
    run_on_threads(4, walk_ring, &ring);
    usleep(10'000);
    rusage before, after;
    getrusage(RUSAGE_SELF, &before);
    usleep(500'000);
    getrusage(RUSAGE_SELF, &after);
    const auto microseconds = [](const rusage& usage) {
        return (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1'000'000 + usage.ru_utime.tv_usec + usage.ru_stime.tv_usec;
    };
    require(microseconds(after) - microseconds(before) < 10'000, "threads spin while there is nothing to do");
}

void check_callers_at_once(int64_t num_rounds) {
    std::vector<std::thread> callers;
    for (int i = 0; i < 3; ++i)
        callers.emplace_back([num_rounds] {
            for (int64_t run = 0; run < num_rounds; ++run) {
                Ring ring;
                ring.num_rounds = 2;
                run_on_threads(3, walk_ring, &ring);
                require(ring.num_calls[0] == 1, "a caller was not called");
                require(ring.num_calls[1] == ring.num_calls[2], "a run had part of its threads");
            }
        });
    for (std::thread& caller : callers) caller.join();
}

// A program of two operations: the threads take numbers, then each looks at all that were taken.
constexpr int64_t kNumItems = 1000;

struct Taken {
    int64_t by[kNumItems] = {};
};

void take_all(const void* args, const octavo::Step*, Thread* thread) {
    Taken& taken = *static_cast<Taken*>(const_cast<void*>(args));
    for (int64_t item; (item = thread->take()) < kNumItems;) taken.by[item] += 1 + thread->index;
}

void look_at_all(const void* args, const octavo::Step*, Thread* thread) {
    const Taken& taken = *static_cast<const Taken*>(args);
    for (const int64_t by : taken.by) require(by >= 1 && by <= thread->count, "an item was not taken once");
}

// As in program.cpp.
struct Operation {
    void (*function)(const void*, const octavo::Step*, Thread*);
    const void* args;
    int64_t waits;
    const char* next;
    int64_t num_panels;
    int64_t panel_bytes;
};
struct Program {
    const Operation* operations;
    int64_t num_operations;
    std::atomic<int64_t>* counters;
    int64_t* nanoseconds;
};

void check_programs(int64_t num_rounds) {
    for (int64_t run = 0; run < num_rounds; ++run) {
        Taken taken;
        const char* next = reinterpret_cast<const char*>(&taken);
        const Operation operations[] = {{take_all, &taken, 1, next, 3, 64}, {look_at_all, &taken, 0, nullptr, 0, 0}};
        const octavo::Step step{};
        std::atomic<int64_t> counters[2];
        int64_t nanoseconds[2] = {};
        const Program program{operations, 2, counters, nanoseconds};
        octavo_run(&program, &step, 1 + run % 4);
        require(nanoseconds[0] > 0, "a program did not run");
    }
}

void check_fork() {
    const pid_t child = fork();
    if (child == 0) {
        alarm(20);
        Ring ring;
        ring.num_rounds = 100;
        run_on_threads(3, walk_ring, &ring);
        _exit(ring.num_calls[2] == 1 ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the pool does not work after a fork");
}

}  // namespace

int main(int, char** arguments) {
    const int64_t num_rounds = std::atoll(arguments[1]);
    check_runs(num_rounds);
    check_idle_costs_nothing();
    check_callers_at_once(num_rounds / 10);
    check_programs(num_rounds / 10);
    check_fork();
    return 0;
}
