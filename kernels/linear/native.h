// `linear`: x times a packed weight, with epilogues.
#pragma once

#include "linear/product.h"

namespace octavo {

inline void run(const LinearArgs& args, const Step& step, const Thread& thread) {
    if (step.num_rows == 0) return;
    const Product product = product_of(args, step.num_rows);
    if (step.num_rows <= kFewRows)
        product.few_rows(step.num_rows, thread);
    else
        product.many_rows(step.num_rows, thread);
}
OCTAVO_OPERATION(linear, LinearArgs)

}  // namespace octavo
