// The strip kernel on AVX2 with FMA and F16C.
#include "kvmem_kernels.h"
#include "score_strip.h"
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
    static constexpr int accumulators = 12; // of 16 registers
    static constexpr int max_vectors = 3;

    static inline vec zero() { return _mm256_setzero_ps(); }
    static inline vec load(const float * p) { return _mm256_load_ps(p); }
    static inline void store(float * p, vec x) { _mm256_storeu_ps(p, x); }
    static inline void store_unaligned(float * p, vec x) { _mm256_storeu_ps(p, x); }
    static inline vec broadcast(float x) { return _mm256_set1_ps(x); }
    static inline vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
    static inline vec sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
    static inline vec mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
    static inline vec max(vec a, vec b) { return _mm256_max_ps(a, b); }
    static inline vec fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
    static inline vec widen(const uint16_t * p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    }

    static inline vec exp2(vec x) { // x <= 0
        x = max(x, broadcast(kvmem::exp2_least));
        const vec whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const vec f = sub(x, whole);
        vec p = broadcast(kvmem::exp2_c5);
        p = fma(p, f, broadcast(kvmem::exp2_c4));
        p = fma(p, f, broadcast(kvmem::exp2_c3));
        p = fma(p, f, broadcast(kvmem::exp2_c2));
        p = fma(p, f, broadcast(kvmem::exp2_c1));
        p = fma(p, f, broadcast(1.0f));
        const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
        return mul(p, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
    }

    static inline vec four(const vec * x) {
        return _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    }
    static inline vec sum_each(const vec * x) { // lane j = sum of the lanes of x[j]
        const vec a = four(x), b = four(x + 4);
        return add(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    }
    static inline float sum(vec x) {
        __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        y = _mm_add_ps(y, _mm_movehl_ps(y, y));
        return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
    }
};

#include "score_strip_impl.h"

} // namespace

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace kvmem {
const strip_kernel strip_kernel_avx2 = {avx2::lanes, avx2::max_vectors, run_strip<avx2, false>,
                                           run_strip<avx2, true>};
}

#endif // KVMEM_X86
