// Choice of the instruction set at run time.
#include "kvmem_kernels.h"
#include "simd.h"

#if KVMEM_X86
#include <cpuid.h>
#endif

namespace kvmem {

static int detect() {
#if KVMEM_X86
    unsigned a = 0, b = 0, c = 0, d = 0;
    // not every compiler's __builtin_cpu_supports knows f16c; the operating system's part is checked with avx2
    const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29));
    if (!f16c || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
        return KVMEM_ISA_PORTABLE;
    }
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
    return avx512 ? KVMEM_ISA_AVX512 : KVMEM_ISA_AVX2;
#else
    return KVMEM_ISA_PORTABLE;
#endif
}

int best_isa() {
    static const int isa = detect();
    return isa;
}

int resolve_isa(int isa) {
    if (isa == KVMEM_ISA_AUTO) {
        return best_isa();
    }
    return isa >= KVMEM_ISA_PORTABLE && isa <= best_isa() ? isa : -1;
}

} // namespace kvmem

int32_t kvmem_kernels_abi(void) { return KVMEM_KERNELS_ABI; }

int32_t kvmem_kernels_isa(void) { return kvmem::best_isa(); }

const char * kvmem_kernels_isa_name(int32_t isa) {
    switch (isa) {
        case KVMEM_ISA_AUTO:     return "auto";
        case KVMEM_ISA_PORTABLE: return "portable";
        case KVMEM_ISA_AVX2:     return "avx2";
        case KVMEM_ISA_AVX512:   return "avx512";
        default:                 return "unknown";
    }
}
