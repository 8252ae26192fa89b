// One compilation unit for all operations that multiply with packed weights: they share the innermost loops, one for
// each kind of weight and number of rows.
#include "experts/native.h"
#include "head_linear/native.h"
#include "linear/native.h"
