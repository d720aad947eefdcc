// Restore rows on AVX-512.
#include "restore_rows.h"
#include "vector_ops.h"

#if KVMEM_X86

#include <cstring>
#include <immintrin.h>

#if !defined(__clang__)
// GCC 12's own header trips over its _mm512_undefined_ps().
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

// Everything above this line is compiled for plain x86-64: a function shared with other files must run anywhere.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")
#endif

namespace {

struct avx512 {
    using vec = __m512;
    static constexpr int lanes = 16;

    static inline vec load(const float * p) { return _mm512_loadu_ps(p); }
    static inline vec load(const uint16_t * p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    }
    static inline void store(uint16_t * p, vec x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    static inline vec mul(vec a, vec b) {
        vec product = _mm512_mul_ps(a, b);
        KVMEM_ROUND(product);
        return product;
    }
    static inline vec sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
    static inline vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
    static inline vec fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
    static inline vec fms(vec a, vec b, vec c) { return _mm512_fmsub_ps(a, b, c); }
    static inline vec fnma(vec a, vec b, vec c) { return _mm512_fnmadd_ps(a, b, c); }

    static inline __m512i counted(int first, int by) {
        const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        return _mm512_add_epi32(_mm512_set1_epi32(first), _mm512_mullo_epi32(lane, _mm512_set1_epi32(by)));
    }
    static inline vec even(vec a, vec b) { return _mm512_permutex2var_ps(a, counted(0, 2), b); }
    static inline vec odd(vec a, vec b) { return _mm512_permutex2var_ps(a, counted(1, 2), b); }
    static inline __m512i alternating(int first) { // first, 16+first, first+1, 16+first+1, ...
        const __m512i lane = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        return _mm512_add_epi32(lane, _mm512_set1_epi32(first));
    }
    static inline vec first(vec y0, vec y1) { return _mm512_permutex2var_ps(y0, alternating(0), y1); }
    static inline vec second(vec y0, vec y1) { return _mm512_permutex2var_ps(y0, alternating(8), y1); }
};

#include "restore_rows_impl.h"

} // namespace

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

void kvmem::restore_rows_avx512(const rows_args & args) { restore_any<avx512>(args); }

#endif // KVMEM_X86
