// The rows that a pipeline stage passes to the next one, through memory that both processes share.
//
// A link has one sender and one receiver. They use its areas in turn, one for each step, and count the steps that they
// have finished, so a sender runs ahead by as many steps as there are areas.
#pragma once

#include <cstring>

#include "native/pool.h"
#include "native/rows.h"

namespace octavo {

// At the start of the shared memory; zeros are a new link. The two counters move in different cache lines.
struct LinkCounters {
    alignas(64) Signal<Scope::machine> sent;
    alignas(64) Signal<Scope::machine> received;
};

// Mirrored by `kernels/stage_exchange/link.py`. Each side has its own, over the same memory.
struct StageLink {
    LinkCounters* counters;
    char* areas;
    int64_t area_bytes;  // of each
    int64_t num_areas;
    int64_t num_steps;  // finished by this side

    char* area() const { return areas + num_steps % num_areas * area_bytes; }
};

// Waits until a counter, which may have wrapped, has reached a number.
inline void wait_until(Signal<Scope::machine>& counter, int64_t number) {
    for (;;) {
        const uint32_t value = counter.value();
        if (static_cast<int32_t>(value - static_cast<uint32_t>(number)) >= 0) return;
        counter.wait_while(value);
    }
}

struct StageExchangeArgs {
    Matrix hidden;  // f32
    Matrix update;  // f32; data null: there is none
    StageLink* link;
};

// Calls `copy(row of a matrix, its place in the area, bytes)` for this thread's rows.
template <typename Copy>
inline void for_each_part(const StageExchangeArgs& args, const Step& step, const Thread& thread, Copy copy) {
    const int64_t hidden_bytes = args.hidden.width * sizeof(float);
    const int64_t update_bytes = args.update.data ? args.update.width * sizeof(float) : 0;
    char* area = args.link->area();
    for_each_row(step, thread, [&](int64_t row) {
        char* place = area + row * (hidden_bytes + update_bytes);
        copy(args.hidden.row<char>(row), place, hidden_bytes);
        if (update_bytes > 0) copy(args.update.row<char>(row), place + hidden_bytes, update_bytes);
    });
}

// Ends a step of one side: all threads are done with the area.
inline void finish_step(StageLink& link, Signal<Scope::machine>& counter, const Thread& thread) {
    thread.wait_for_all();
    if (thread.index == 0) {
        ++link.num_steps;
        counter.change();
    }
}

struct SendRowsArgs : StageExchangeArgs {};

// Waits for a free area; then the receiver may read the rows.
inline void run(const SendRowsArgs& args, const Step& step, const Thread& thread) {
    StageLink& link = *args.link;
    wait_until(link.counters->received, link.num_steps - link.num_areas + 1);
    for_each_part(args, step, thread, [](const char* row, char* place, int64_t num_bytes) {
        std::memcpy(place, row, num_bytes);
    });
    finish_step(link, link.counters->sent, thread);
}
OCTAVO_OPERATION(send_rows, SendRowsArgs)

struct ReceiveRowsArgs : StageExchangeArgs {};

// Waits for the rows of the step; then the sender may use the area again.
inline void run(const ReceiveRowsArgs& args, const Step& step, const Thread& thread) {
    StageLink& link = *args.link;
    wait_until(link.counters->sent, link.num_steps + 1);
    for_each_part(args, step, thread, [](char* row, const char* place, int64_t num_bytes) {
        std::memcpy(row, place, num_bytes);
    });
    finish_step(link, link.counters->received, thread);
}
OCTAVO_OPERATION(receive_rows, ReceiveRowsArgs)

}  // namespace octavo
