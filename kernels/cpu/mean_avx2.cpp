// Sum of raw K rows with F16C.
#include "mean.h"
#include "simd.h"

#if KVMEM_X86

#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif

namespace {

inline void add(double * sum, __m128 x) {
    _mm256_storeu_pd(sum, _mm256_add_pd(_mm256_loadu_pd(sum), _mm256_cvtps_pd(x)));
}

void add_f32(double * sum, const uint8_t * row, int64_t n) {
    const float * x = reinterpret_cast<const float *>(row);
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        add(sum + i, _mm_loadu_ps(x + i));
    }
    for (; i < n; ++i) {
        sum[i] += double(x[i]);
    }
}

void add_f16(double * sum, const uint8_t * row, int64_t n) {
    const uint16_t * x = reinterpret_cast<const uint16_t *>(row);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 y = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(x + i)));
        add(sum + i, _mm256_castps256_ps128(y));
        add(sum + i + 4, _mm256_extractf128_ps(y, 1));
    }
    for (; i < n; ++i) {
        sum[i] += double(kvmem::half_to_float(x[i]));
    }
}

} // namespace

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace kvmem {
const add_row_kernel add_row_avx2 = {add_f32, add_f16};
}

#endif // KVMEM_X86
