// The strip kernel on AVX-512.
#include "kvmem_kernels.h"
#include "score_strip.h"
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
    static constexpr int accumulators = 24; // of 32 registers
    static constexpr int max_vectors = 4;

    static inline vec zero() { return _mm512_setzero_ps(); }
    static inline vec load(const float * p) { return _mm512_load_ps(p); }
    static inline void store(float * p, vec x) { _mm512_storeu_ps(p, x); }
    static inline void store_unaligned(float * p, vec x) { _mm512_storeu_ps(p, x); }
    static inline vec broadcast(float x) { return _mm512_set1_ps(x); }
    static inline vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
    static inline vec sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
    static inline vec mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
    static inline vec max(vec a, vec b) { return _mm512_max_ps(a, b); }
    static inline vec fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
    static inline vec widen(const uint16_t * p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    }
    static inline float sum(vec x) { return _mm512_reduce_add_ps(x); }

    static inline vec exp2(vec x) { // x <= 0
        x = max(x, broadcast(kvmem::exp2_least));
        const vec whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const vec f = sub(x, whole);
        vec p = broadcast(kvmem::exp2_c5);
        p = fma(p, f, broadcast(kvmem::exp2_c4));
        p = fma(p, f, broadcast(kvmem::exp2_c3));
        p = fma(p, f, broadcast(kvmem::exp2_c2));
        p = fma(p, f, broadcast(kvmem::exp2_c1));
        p = fma(p, f, broadcast(1.0f));
        return _mm512_scalef_ps(p, whole);
    }

    static inline vec fold_pairs(vec a, vec b) { return add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); }
    static inline vec fold_quads(vec a, vec b) {
        const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
        return add(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    static inline vec fold_lanes(vec a, vec b) {
        return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    static inline vec four(const vec * x) { return fold_quads(fold_pairs(x[0], x[1]), fold_pairs(x[2], x[3])); }
    static inline vec sum_each(const vec * x) { // lane j = sum of the lanes of x[j]
        return fold_lanes(fold_lanes(four(x), four(x + 4)), fold_lanes(four(x + 8), four(x + 12)));
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
const strip_kernel strip_kernel_avx512 = {avx512::lanes, avx512::max_vectors, run_strip<avx512, false>,
                                           run_strip<avx512, true>};
}

#endif // KVMEM_X86
