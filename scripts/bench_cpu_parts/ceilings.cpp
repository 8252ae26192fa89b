// What this machine can do at most: bytes read from memory, and dot products of bfloat16 and of 8-bit integers, per second.
// Built and called by ceilings.py. Knows nothing of models, and none of it is used to compute one.

#include <immintrin.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t huge_page = std::size_t{2} << 20;
constexpr std::size_t prefetch_bytes = 2048;  // ahead of the load; the hardware's own prefetcher stops at 4 KB pages

// A register's worth of anything: one AVX-512 register, or whatever the compiler makes of 64 bytes elsewhere.
typedef std::int64_t Line __attribute__((vector_size(64)));

std::atomic<std::int64_t> sink;  // whatever is computed goes here, so that it has to be computed

// Runs body(thread) on that many threads at once; returns the seconds from the first start to the last end.
double seconds_of(int num_threads, const std::function<void(int)>& body) {
    std::atomic<int> num_waiting{num_threads};
    std::vector<Clock::time_point> starts(num_threads), ends(num_threads);
    std::vector<std::thread> threads;
    for (int thread = 0; thread < num_threads; ++thread)
        threads.emplace_back([&, thread] {
            --num_waiting;
            while (num_waiting.load() > 0) std::this_thread::yield();
            starts[thread] = Clock::now();
            body(thread);
            ends[thread] = Clock::now();
        });
    for (auto& thread : threads) thread.join();
    auto first = *std::min_element(starts.begin(), starts.end());
    auto last = *std::max_element(ends.begin(), ends.end());
    return std::chrono::duration<double>(last - first).count();
}

// Reads every byte once. Eight sums, because one would wait for itself.
std::int64_t read_all(const Line* lines, std::size_t num_lines) {
    Line sums[8] = {};
    for (std::size_t i = 0; i + 8 <= num_lines; i += 8)
        for (std::size_t k = 0; k < 8; ++k) {
            __builtin_prefetch(reinterpret_cast<const char*>(lines + i + k) + prefetch_bytes);
            sums[k] ^= lines[i + k];
        }
    for (int k = 1; k < 8; ++k) sums[0] ^= sums[k];
    return sums[0][0] ^ sums[0][1] ^ sums[0][2] ^ sums[0][3] ^ sums[0][4] ^ sums[0][5] ^ sums[0][6] ^ sums[0][7];
}

constexpr int num_sums = 16;  // independent chains: more than latency times throughput of a dot instruction

#if defined(__AVX512BF16__)
// Each instruction multiplies and adds 32 pairs of bfloat16.
void dot_bf16(std::int64_t num_rounds) {
    __m512 sums[num_sums];
    for (auto& sum : sums) sum = _mm512_setzero_ps();
    __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f80), b = a;  // 1.0
    for (std::int64_t round = 0; round < num_rounds; ++round) {
#pragma GCC unroll 16
        for (int k = 0; k < num_sums; ++k) sums[k] = _mm512_dpbf16_ps(sums[k], a, b);
        asm volatile("" : "+v"(a), "+v"(b));  // not known to be the same the next time
    }
    for (int k = 1; k < num_sums; ++k) sums[0] = _mm512_add_ps(sums[0], sums[k]);
    sink += static_cast<std::int64_t>(_mm512_cvtss_f32(sums[0]));
}
constexpr double bf16_per_dot = 2 * 32;
#else
void dot_bf16(std::int64_t) {}
constexpr double bf16_per_dot = 0;
#endif

#if defined(__AVX512VNNI__)
// Each instruction multiplies and adds 64 pairs of bytes.
void dot_int8(std::int64_t num_rounds) {
    __m512i sums[num_sums];
    for (auto& sum : sums) sum = _mm512_setzero_si512();
    __m512i a = _mm512_set1_epi8(1), b = a;
    for (std::int64_t round = 0; round < num_rounds; ++round) {
#pragma GCC unroll 16
        for (int k = 0; k < num_sums; ++k) sums[k] = _mm512_dpbusd_epi32(sums[k], a, b);
        asm volatile("" : "+v"(a), "+v"(b));
    }
    for (int k = 1; k < num_sums; ++k) sums[0] = _mm512_add_epi32(sums[0], sums[k]);
    sink += _mm512_cvtsi512_si32(sums[0]);
}
constexpr double int8_per_dot = 2 * 64;
#else
void dot_int8(std::int64_t) {}
constexpr double int8_per_dot = 0;
#endif

// Matrix registers (AMX): an instruction multiplies 16 rows by 16 columns, over 64 bytes of each. A round of 16 dot products
// takes about as long as half of one.
#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
constexpr double products_per_tile = 2 * 16 * 16 * 64;  // of bytes; half as many of bfloat16
constexpr std::int64_t rounds_per_tiles = 8;            // of dot products, for four of these

// Whether Linux grants the registers to this process; a sandbox or an old kernel may refuse.
bool has_tiles() {
    constexpr long request_permission = 0x1023, tile_data = 18;
    static const bool granted = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
    return granted;
}

template <typename Multiply>
void in_tiles(std::int64_t num_rounds, Multiply multiply) {
    struct alignas(64) {
        std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
        std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } configuration;
    asm volatile("" ::"r"(&configuration) : "memory");
    _tile_loadconfig(&configuration);
    for (std::int64_t round = 0; round < num_rounds; round += rounds_per_tiles) multiply();
    _tile_release();
}

void tile_bf16(std::int64_t num_rounds) {
    in_tiles(num_rounds, [] {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    });
}

void tile_int8(std::int64_t num_rounds) {
    in_tiles(num_rounds, [] {
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
    });
}
#else
constexpr double products_per_tile = 0;
constexpr std::int64_t rounds_per_tiles = 1;
bool has_tiles() { return false; }
void tile_bf16(std::int64_t) {}
void tile_int8(std::int64_t) {}
#endif

double best_rate(int num_threads, int repeats, double work_per_thread, const std::function<void(int)>& body) {
    double best = 0;
    for (int repeat = 0; repeat < repeats; ++repeat)
        best = std::max(best, work_per_thread * num_threads / seconds_of(num_threads, body));
    return best;
}

}  // namespace

extern "C" {

// Memory in huge pages where the system gives them, every page touched; null when there is none.
void* make_buffer(std::size_t bytes) {
    void* data = std::aligned_alloc(huge_page, bytes / huge_page * huge_page);
    if (data == nullptr) return nullptr;
    madvise(data, bytes / huge_page * huge_page, MADV_HUGEPAGE);
    std::memset(data, 1, bytes / huge_page * huge_page);
    return data;
}

void free_buffer(void* data) { std::free(data); }

// Bytes per second, best of several passes over the buffer.
double read_rate(const void* data, std::size_t bytes, int num_threads, int repeats) {
    std::size_t lines = bytes / huge_page * huge_page / sizeof(Line) / num_threads;
    auto body = [&](int thread) { sink += read_all(static_cast<const Line*>(data) + thread * lines, lines); };
    return best_rate(num_threads, repeats, double(lines * sizeof(Line)), body);
}

// Floating-point operations per second, a product and a sum counted as two; 0 without such an instruction. The rounds are
// those of dot products; a multiple of 8.
double bf16_rate(std::int64_t num_rounds, int num_threads, int repeats) {
    if (has_tiles()) {
        const double work = double(num_rounds / rounds_per_tiles) * 4 * products_per_tile / 2;
        return best_rate(num_threads, repeats, work, [&](int) { tile_bf16(num_rounds); });
    }
    return best_rate(num_threads, repeats, num_rounds * num_sums * bf16_per_dot, [&](int) { dot_bf16(num_rounds); });
}

// The same of integers.
double int8_rate(std::int64_t num_rounds, int num_threads, int repeats) {
    if (has_tiles()) {
        const double work = double(num_rounds / rounds_per_tiles) * 4 * products_per_tile;
        return best_rate(num_threads, repeats, work, [&](int) { tile_int8(num_rounds); });
    }
    return best_rate(num_threads, repeats, num_rounds * num_sums * int8_per_dot, [&](int) { dot_int8(num_rounds); });
}
}
