// What score_strip_impl.h and restore_rows_impl.h share over all instruction sets.
#pragma once

#include "simd.h"

// Loops over registers: the arrays must become registers, so these loops must vanish.
#if defined(__clang__)
#define KVMEM_UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define KVMEM_UNROLL _Pragma("GCC unroll 32")
#else
#define KVMEM_UNROLL
#endif

// Makes x a value of its own: a product that no compiler may contract with the addition that follows it. (GCC
// contracts even the intrinsics of separate multiplications and additions.) A macro, because a function would have to
// carry the caller's target.
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define KVMEM_ROUND(x) __asm__("" : "+x"(x))
#elif defined(__aarch64__)
#define KVMEM_ROUND(x) __asm__("" : "+w"(x))
#else
#define KVMEM_ROUND(x) \
    do { \
        volatile auto kept = x; \
        x = kept; \
    } while (0)
#endif

namespace kvmem {

// 2^x on [-1/2, 1/2] as 1 + x*(c1 + x*(c2 + ...)), minimax in the relative error: 1e-7. 2^0 is exactly 1.
constexpr float exp2_c1 = 0.693146977597679f;
constexpr float exp2_c2 = 0.240222420831118f;
constexpr float exp2_c3 = 0.055507337444710f;
constexpr float exp2_c4 = 0.009671512785780f;
constexpr float exp2_c5 = 0.001326472725272f;
// Weights below 2^-126 of their tile's largest count as 2^-126: no subnormal arithmetic, which is slow.
constexpr float exp2_least = -126.0f;

} // namespace kvmem
