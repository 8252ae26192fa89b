// The operations that multiply with packed weights in one unit of compilation: they share the innermost loops, of which
// there is one for each kind of weight and number of rows.
#include "experts/native.h"
#include "head_linear/native.h"
#include "linear/native.h"
