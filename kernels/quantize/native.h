// `quantize`, one operation of a program.
#pragma once

#include "quantize/rows.h"

namespace octavo {

OCTAVO_OPERATION(quantize, QuantizeArgs)

}  // namespace octavo
