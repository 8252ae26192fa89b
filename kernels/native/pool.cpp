// The thread pool: see pool.h. Linux only. `threads.py` chooses the number of threads.
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <cstring>
#include <mutex>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {
namespace {

// How long a thread spins before it sleeps: longer than the imbalance of an operation and the time between two decode
// steps, which a wake-up in a virtual machine would prolong. Short enough that an idle process uses no processor time.
constexpr int64_t kSpinNs = 400'000;
// After this time it yields its core between two looks: to the core process, which plans between steps, or to a thread
// of its own step that has lost its core.
constexpr int64_t kYieldNs = 30'000;
// Longer absences after a yield are counted in `offered_ns`: another thread has run meanwhile.
constexpr int64_t kAbsenceNs = 2'000;
// Least time between two moves of a thread to another core: beside busy processes a move may not help.
constexpr int64_t kMinMoveNs = 1'000'000;
// Reads of the value between two reads of the clock, each of which costs 20 to 30 ns.
constexpr int kLooks = 16;
constexpr int64_t kMaxThreads = 512;

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

// Total time that threads were away from cores that they had yielded. They would only have waited in that time.
std::atomic<int64_t> offered_ns{0};

// Both functions may return early; callers check again. To the kernel a 32-bit std::atomic is a plain word.
template <Scope kScope>
void sleep_while(const std::atomic<uint32_t>& word, uint32_t value) {
    constexpr int kFlag = kScope == Scope::process ? FUTEX_PRIVATE_FLAG : 0;
    syscall(SYS_futex, &word, FUTEX_WAIT | kFlag, value, nullptr, nullptr, 0);
}
template <Scope kScope>
void wake_all(const std::atomic<uint32_t>& word) {
    constexpr int kFlag = kScope == Scope::process ? FUTEX_PRIVATE_FLAG : 0;
    syscall(SYS_futex, &word, FUTEX_WAKE | kFlag, INT_MAX, nullptr, nullptr, 0);
}

// Moves the calling thread away from a core, to any other on which it may run. Does nothing if there is none, or if the
// thread has moved a moment ago.
void leave_core(int cpu) {
    static thread_local int64_t last_ns = 0;
    const int64_t now = now_ns();
    cpu_set_t allowed;
    if (now - last_ns < kMinMoveNs || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    last_ns = now;
    cpu_set_t others = allowed;
    CPU_CLR(cpu, &others);
    if (CPU_COUNT(&others) == 0) return;
    sched_setaffinity(0, sizeof others, &others);
    // Linux keeps this mask when the cpuset of the process changes. If the cpuset was the only limit, the thread gets a
    // mask without limits, because the cpuset may grow.
    cpu_set_t all, found;
    std::memset(&all, 0xff, sizeof all);
    const bool has_all = sched_setaffinity(0, sizeof all, &all) == 0 && sched_getaffinity(0, sizeof found, &found) == 0;
    if (!has_all || !CPU_EQUAL(&found, &allowed)) sched_setaffinity(0, sizeof allowed, &allowed);
}

// The arguments of one run, for its threads.
struct Call {
    Ahead (*function)(void*, Thread);
    void* context;
    int64_t count;
};

// The end of a run: the number of threads still working, and the signal that the last one sends.
struct alignas(64) Join {
    std::atomic<int64_t> num_working{0};
    Signal<Scope::process> done;
};

// A thread of the pool and its start signal, in one cache line: no other line moves when a run begins. Each thread has
// its own signal, so a run with few threads does not wake the others, and the next run does not wait for them.
struct alignas(64) Member {
    Signal<Scope::process> start;
    Call call{};  // written by the caller before it changes `start`
    Join* join;
    Barrier* barrier;
    alignas(64) int64_t index;
    pthread_t handle{};
    std::atomic<int64_t> thread_id{0};
};

struct Pool {
    std::mutex in_use;
    Barrier barrier;
    Join join;
    Member* members[kMaxThreads];  // thread 1, 2, ...; never freed
    int64_t num_members = 0;
    int cpus[kMaxThreads];  // processors of thread 0, 1, ...; the other threads are not bound
    int64_t num_cpus = 0;
};

Pool* pool = new Pool;  // never destroyed: its threads end with the process

// A fork copies the pool but not its threads.
void forget_pool() { pool = new Pool; }
const int kForkHandler = pthread_atfork(nullptr, nullptr, forget_pool);

void* serve(void* argument) {
    Member& member = *static_cast<Member*>(argument);
    member.thread_id.store(syscall(SYS_gettid), std::memory_order_release);
    Ahead ahead;
    for (uint32_t seen = 0;; ++seen) {
        member.start.wait_while(seen, &ahead);
        const Call call = member.call;
        ahead = call.function(call.context, Thread{member.index, call.count, nullptr, member.barrier});
        Join& join = *member.join;
        if (join.num_working.fetch_sub(1, std::memory_order_acq_rel) == 1) join.done.change();
    }
    return nullptr;
}

int bind(pthread_t thread, int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    return pthread_setaffinity_np(thread, sizeof set, &set);
}

// Starts threads until the pool has `count` including the caller's, or the system refuses more.
void grow(Pool& pool, int64_t count) {
    // Python's threads handle signals; a signal would only interrupt these.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.num_members + 1 < std::min(count, kMaxThreads)) {
        Member* member = new Member;
        member->join = &pool.join;
        member->barrier = &pool.barrier;
        member->index = pool.num_members + 1;
        if (pthread_create(&member->handle, nullptr, serve, member) != 0) {
            delete member;
            break;
        }
        pthread_setname_np(member->handle, "octavo-kernels");
        if (member->index < pool.num_cpus) bind(member->handle, pool.cpus[member->index]);
        pool.members[pool.num_members++] = member;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace

template <Scope kScope>
void Signal<kScope>::change() {
    // Sequentially consistent, like its counterpart below: either the thread that changes the value sees the sleeper,
    // or the thread that goes to sleep sees the new value.
    value_.fetch_add(1, std::memory_order_seq_cst);
    if (num_sleepers_.load(std::memory_order_seq_cst) > 0) wake_all<kScope>(value_);
}

template <Scope kScope>
void Signal<kScope>::wait_while(uint32_t old, Ahead* ahead) {
    for (int64_t start_ns = 0;;) {
        for (int i = 0; i < kLooks; ++i) {
            if (value_.load(std::memory_order_acquire) != old) return;
            if (ahead == nullptr || !ahead->fetch_line()) pause();
        }
        const int64_t now = now_ns();
        if (start_ns == 0) start_ns = now;
        if (now - start_ns > kSpinNs) break;
        if (now - start_ns > kYieldNs) {
            sched_yield();
            const int64_t absence = now_ns() - now;
            if (absence > kAbsenceNs && value_.load(std::memory_order_acquire) == old)
                offered_ns.fetch_add(absence, std::memory_order_relaxed);
        }
    }
    num_sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (value_.load(std::memory_order_seq_cst) == old) sleep_while<kScope>(value_, old);
    num_sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

template <Scope kScope>
void BarrierOf<kScope>::wait(Ahead* ahead) {
    // Read all before this thread counts as arrived: after that, the last thread may begin the next round.
    const int64_t count = count_;
    const uint32_t round = all_arrived_.value();
    const int32_t core = sched_getcpu() + 1, core_of_waiting = core_of_waiting_.load(std::memory_order_relaxed);
    core_of_waiting_.store(core, std::memory_order_relaxed);
    if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
        core_of_waiting_.store(0, std::memory_order_relaxed);
        num_arrived_.store(0, std::memory_order_relaxed);
        all_arrived_.change();
        // Linux puts threads that wake up on one core although others are idle, and separates them only after
        // milliseconds, in which they run in turn (docs/performance.md).
        if (core == core_of_waiting && core > 0) leave_core(core - 1);
    } else {
        all_arrived_.wait_while(round, ahead);
    }
}

template class Signal<Scope::machine>;
template class BarrierOf<Scope::process>;
template class BarrierOf<Scope::machine>;

void run_on_threads(int64_t count, Ahead (*function)(void*, Thread), void* context) {
    Pool& shared = *pool;
    std::unique_lock<std::mutex> lock(shared.in_use, std::defer_lock);
    if (count <= 1 || !lock.try_lock()) {
        Barrier alone;
        function(context, Thread{0, 1, nullptr, &alone});
        return;
    }
    grow(shared, count);
    count = std::min(count, shared.num_members + 1);
    shared.barrier.set_count(count);
    Join& join = shared.join;
    join.num_working.store(count - 1, std::memory_order_relaxed);
    const uint32_t round = join.done.value();
    for (int64_t i = 0; i + 1 < count; ++i) {
        shared.members[i]->call = {function, context, count};
        shared.members[i]->start.change();
    }
    function(context, Thread{0, count, nullptr, &shared.barrier});
    if (count > 1) join.done.wait_while(round);
}

}  // namespace octavo

// Binds the calling thread to the first processor and the pool's threads to the others, one each. Threads beyond the
// list are not bound. Returns 0 or an errno.
extern "C" int32_t octavo_bind_threads(const int64_t* cpus, int64_t count) {
    using namespace octavo;
    Pool& shared = *pool;
    const std::lock_guard<std::mutex> held(shared.in_use);
    shared.num_cpus = std::min(count, kMaxThreads);
    for (int64_t i = 0; i < shared.num_cpus; ++i) shared.cpus[i] = static_cast<int>(cpus[i]);
    grow(shared, shared.num_cpus);
    int error = shared.num_cpus > 0 ? bind(pthread_self(), shared.cpus[0]) : 0;
    for (int64_t i = 1; i < std::min(shared.num_cpus, shared.num_members + 1) && error == 0; ++i)
        error = bind(shared.members[i - 1]->handle, shared.cpus[i]);
    return error;
}

// Returns the total time that waiting threads have been away from cores that they had yielded. The system counts this
// as waiting for a core, but nothing was lost.
extern "C" int64_t octavo_offered_ns() { return octavo::offered_ns.load(std::memory_order_relaxed); }

// Writes the kernel thread ids of the pool's threads, at most `count`, and returns how many it has written. The
// caller's thread is not included.
extern "C" int64_t octavo_thread_ids(int64_t* ids, int64_t count) {
    using namespace octavo;
    Pool& shared = *pool;
    const std::lock_guard<std::mutex> held(shared.in_use);
    int64_t num_written = 0;
    for (int64_t i = 0; i < shared.num_members; ++i) {
        const int64_t id = shared.members[i]->thread_id.load(std::memory_order_acquire);
        if (id != 0 && num_written < count) ids[num_written++] = id;
    }
    return num_written;
}
