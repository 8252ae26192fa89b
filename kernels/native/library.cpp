// What the library tells about itself.
#include "isa.h"

#if defined(OCTAVO_AMX)
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// Linux lets a process use the tile registers after it has asked; threads and forks inherit that. `isa.py` chooses the
// level only if the answer is yes. ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA.
[[maybe_unused]] const long kAsked = syscall(SYS_arch_prctl, 0x1023, 18);

}  // namespace
#endif

// The level that it was compiled for.
extern "C" const char* octavo_isa_level() { return octavo::kIsaLevel; }
