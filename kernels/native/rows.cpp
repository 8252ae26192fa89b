// All row operations in one unit of compilation: each `native.h` below is one operation.
#include "add/native.h"
#include "cast/native.h"
#include "embedding/native.h"
#include "relu/native.h"
#include "rms_norm/native.h"
#include "rope/native.h"
#include "silu_and_mul/native.h"
