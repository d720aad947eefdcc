// Restore rows one lane at a time.
#include "restore_rows.h"
#include "vector_ops.h"

#include <cstring>

namespace {
#include "restore_rows_impl.h"
}

void kvmem::restore_rows_portable(const rows_args & args) { restore_any<one_lane>(args); }
