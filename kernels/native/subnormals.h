// Subnormal numbers as zero, for some scope of a thread.
#pragma once

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace octavo {

// Makes the calling thread of an x86 processor take subnormals for zeros, as tile registers always do. Intel's vector
// registers take 150 cycles for a result that is subnormal. Other processors keep subnormals.
class SubnormalsAreZero {
   public:
    SubnormalsAreZero() {
#if defined(__SSE2__)
        _mm_setcsr(before_ | 0x8040);
        asm volatile("" ::: "memory");
#endif
    }
    SubnormalsAreZero(const SubnormalsAreZero&) = delete;
    ~SubnormalsAreZero() {
#if defined(__SSE2__)
        _mm_setcsr(before_);
#endif
    }

   private:
#if defined(__SSE2__)
    const unsigned before_ = _mm_getcsr();
#endif
};

}  // namespace octavo
