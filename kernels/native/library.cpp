// What the library tells about itself.
#include "isa.h"

// The level that it was compiled for.
extern "C" const char* octavo_isa_level() { return octavo::kIsaLevel; }
