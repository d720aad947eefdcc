// Sum of raw K rows: the one place that adds.
#pragma once

#include <cstdint>

namespace kvmem {

// sum[i] += row[i] for every element, in float64. Each element is its own sum, so the order of additions is the order
// of rows on every instruction set.
using add_row_fn = void (*)(double * sum, const uint8_t * row, int64_t n);

struct add_row_kernel {
    add_row_fn f32;
    add_row_fn f16;
};

extern const add_row_kernel add_row_avx2;

} // namespace kvmem
