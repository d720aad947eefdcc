// The strip kernel in the compiler's own vectors of four floats (SSE2, NEON and whatever else has 128 bits), and the
// choice among the instruction sets.
#include "kvmem_kernels.h"
#include "score_strip.h"
#include "vector_ops.h"

#include <cstring>

namespace {

struct portable {
    typedef float vec __attribute__((vector_size(16)));
    typedef int32_t ivec __attribute__((vector_size(16)));
    static constexpr int lanes = 4;
    static constexpr int accumulators = 12;
    static constexpr int max_vectors = 3;

    static inline vec zero() { return vec{}; }
    static inline vec load(const float * p) {
        vec x;
        std::memcpy(&x, p, sizeof x);
        return x;
    }
    static inline void store(float * p, vec x) { std::memcpy(p, &x, sizeof x); }
    static inline void store_unaligned(float * p, vec x) { store(p, x); }
    static inline vec broadcast(float x) { return vec{x, x, x, x}; }
    static inline vec add(vec a, vec b) { return a + b; }
    static inline vec sub(vec a, vec b) { return a - b; }
    static inline vec mul(vec a, vec b) { return a * b; }
    static inline vec max(vec a, vec b) { return a > b ? a : b; }
    static inline vec fma(vec a, vec b, vec c) { return a * b + c; }
    static inline vec widen(const uint16_t * p) {
        return vec{kvmem::half_to_float(p[0]), kvmem::half_to_float(p[1]), kvmem::half_to_float(p[2]),
                   kvmem::half_to_float(p[3])};
    }
    static inline float sum(vec x) { return (x[0] + x[2]) + (x[1] + x[3]); }

    static inline vec exp2(vec x) { // x <= 0
        x = max(x, broadcast(kvmem::exp2_least));
        // adding 1.5 * 2^23 leaves the nearest integer in the low bits
        const vec shifted = x + broadcast(12582912.0f);
        const vec f = x - (shifted - broadcast(12582912.0f));
        vec p = broadcast(kvmem::exp2_c5);
        p = p * f + broadcast(kvmem::exp2_c4);
        p = p * f + broadcast(kvmem::exp2_c3);
        p = p * f + broadcast(kvmem::exp2_c2);
        p = p * f + broadcast(kvmem::exp2_c1);
        p = p * f + broadcast(1.0f);
        const ivec exponent = ((ivec)shifted - 0x4b400000 + 127) << 23;
        return p * (vec)exponent;
    }

    static inline vec sum_each(const vec * x) { return vec{sum(x[0]), sum(x[1]), sum(x[2]), sum(x[3])}; }
};

#include "score_strip_impl.h"

} // namespace

namespace kvmem {

const strip_kernel strip_kernel_portable = {portable::lanes, portable::max_vectors, run_strip<portable, false>,
                                           run_strip<portable, true>};

const strip_kernel & strip_kernel_for(int isa) {
#if KVMEM_X86
    switch (isa) {
        case KVMEM_ISA_AVX512: return strip_kernel_avx512;
        case KVMEM_ISA_AVX2:   return strip_kernel_avx2;
        default: break;
    }
#else
    (void)isa;
#endif
    return strip_kernel_portable;
}

} // namespace kvmem
