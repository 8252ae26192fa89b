// All row operations in one unit of compilation: each `native.h` below is one operation.
#include "native/step.h"
#include "native/vec.h"
