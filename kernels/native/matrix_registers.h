// The eight tile registers of processors with AMX: their configuration and release.
#pragma once

#include "native/dot.h"

#if defined(OCTAVO_AMX)

namespace octavo {
namespace {

constexpr int64_t kTileRows = 16;  // rows of a tile register, 64 bytes each

// The tile registers of the calling thread. They are released at the end, so that other code may configure them and a
// context switch need not save them.
class MatrixRegisters {
   public:
    struct Shape {
        int rows;
        int row_bytes;
    };

    MatrixRegisters() = default;
    MatrixRegisters(const MatrixRegisters&) = delete;
    ~MatrixRegisters() {
        if (configured_key != 0) _tile_release();
        configured_key = 0;
    }

    // Gives register i the shape `shape_of(i)`. `key` identifies the set of shapes and is not 0. While it stays the
    // same, nothing is done, because reconfiguring takes longer than a product.
    template <typename ShapeOf>
    static void configure(int key, ShapeOf shape_of) {
        if (configured_key == key) return;
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } configuration;
        for (int tile = 0; tile < 8; ++tile) {
            const Shape shape = shape_of(tile);
            configuration.rows[tile] = static_cast<uint8_t>(shape.rows);
            configuration.row_bytes[tile] = static_cast<uint16_t>(shape.row_bytes);
        }
        // g++ 12 believes that the instruction reads 8 bytes, and that tile loads read none.
        asm volatile("" ::"r"(&configuration) : "memory");
        _tile_loadconfig(&configuration);
        configured_key = key;
    }

   private:
    static inline thread_local int configured_key = 0;  // 0: not configured
};

}  // namespace
}  // namespace octavo

#endif
