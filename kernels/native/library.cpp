// Which instruction set level the library was built for.
#include "isa.h"

#if defined(OCTAVO_AMX)
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// Linux lets a process use the AMX tile registers after it has requested them; threads and forks inherit the
// permission. `isa.py` chooses the AMX level only if Linux permits it. The numbers are ARCH_REQ_XCOMP_PERM and
// XFEATURE_XTILEDATA.
[[maybe_unused]] const long kAsked = syscall(SYS_arch_prctl, 0x1023, 18);

}  // namespace
#endif

// The level that the library was compiled for.
extern "C" const char* octavo_isa_level() { return octavo::kIsaLevel; }
