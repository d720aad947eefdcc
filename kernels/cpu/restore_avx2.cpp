// Restore rows on AVX2 with FMA and F16C.
#include "restore_rows.h"
#include "vector_ops.h"

#if KVMEM_X86

#include <cstring>
#include <immintrin.h>

// Everything above this line is compiled for plain x86-64: a function shared with other files must run anywhere.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace {

struct avx2 {
    using vec = __m256;
    static constexpr int lanes = 8;

    static inline vec load(const float * p) { return _mm256_loadu_ps(p); }
    static inline vec load(const uint16_t * p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    }
    static inline void store(uint16_t * p, vec x) {
        _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    static inline vec mul(vec a, vec b) {
        vec product = _mm256_mul_ps(a, b);
        KVMEM_ROUND(product);
        return product;
    }
    static inline vec sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
    static inline vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
    static inline vec fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
    static inline vec fms(vec a, vec b, vec c) { return _mm256_fmsub_ps(a, b, c); }
    static inline vec fnma(vec a, vec b, vec c) { return _mm256_fnmadd_ps(a, b, c); }

    // shuffles work within halves of 128 bits; the middle quarters change places
    static inline vec in_order(vec x) {
        return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8));
    }
    static inline vec even(vec a, vec b) { return in_order(_mm256_shuffle_ps(a, b, 0x88)); }
    static inline vec odd(vec a, vec b) { return in_order(_mm256_shuffle_ps(a, b, 0xdd)); }
    static inline vec first(vec y0, vec y1) { return _mm256_unpacklo_ps(in_order(y0), in_order(y1)); }
    static inline vec second(vec y0, vec y1) { return _mm256_unpackhi_ps(in_order(y0), in_order(y1)); }
};

#include "restore_rows_impl.h"

} // namespace

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

void kvmem::restore_rows_avx2(const rows_args & args) { restore_any<avx2>(args); }

#endif // KVMEM_X86
