// Raw K rows of consecutive tokens -> rotated float16 cell rows.
#pragma once

#include "kvmem_kernels.h"

namespace kvmem {

struct rows_args {
    const kvmem_restore_layer * layer;
    const uint8_t * raw;    // raw K of the first token; layer->k_stride apart
    const int32_t * cells;  // [n]
    int32_t n;
    int32_t pos0;
    int32_t row_type;
    int32_t form;
};

using restore_rows_fn = void (*)(const rows_args & args);

void restore_rows_portable(const rows_args & args);
void restore_rows_avx2(const rows_args & args);
void restore_rows_avx512(const rows_args & args);

} // namespace kvmem
