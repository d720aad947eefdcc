// Which instruction sets this build and this CPU have, and float16 <-> float32 without any of them.
#pragma once

#include <cstdint>
#include <cstring>

// The x86 kernels need per-function targets, so that the library itself runs on any x86-64.
#if (defined(__x86_64__) || defined(_M_X64)) && (defined(__GNUC__) || defined(__clang__))
#define KVMEM_X86 1
#else
#define KVMEM_X86 0
#endif

namespace kvmem {

int best_isa();               // enum kvmem_isa, never AUTO
int resolve_isa(int isa);     // AUTO -> best_isa(); -1 for one this CPU lacks

#if defined(__ARM_FP16_FORMAT_IEEE)

inline float half_to_float(uint16_t h) {
    __fp16 value;
    std::memcpy(&value, &h, 2);
    return float(value);
}

inline uint16_t float_to_half(float value) {
    const __fp16 rounded = __fp16(value);
    uint16_t h;
    std::memcpy(&h, &rounded, 2);
    return h;
}

#else

// Scaling by 2^112 moves the exponent from float16's bias to float32's and normalises subnormals on the way.
inline float half_to_float(uint16_t h) {
    const uint32_t magnitude = uint32_t(h & 0x7fffu) << 13;
    float value;
    if (magnitude >= 0x0f800000u) { // infinity and NaN keep their bits
        const uint32_t bits = magnitude | 0x7f800000u;
        std::memcpy(&value, &bits, 4);
    } else {
        std::memcpy(&value, &magnitude, 4);
        value *= 0x1p112f;
    }
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    bits |= uint32_t(h & 0x8000u) << 16;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Round to nearest, ties to even, as VCVTPS2PH does.
inline uint16_t float_to_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) {
        return uint16_t(sign | 0x7e00u | ((bits >> 13) & 0x3ffu)); // quiet NaN, payload kept
    }
    if (bits >= 0x477ff000u) {
        return uint16_t(sign | 0x7c00u); // 65520 and above
    }
    if (bits < 0x38800000u) { // below 2^-14: adding 0.5 leaves the rounded subnormal in the low bits
        float magnitude;
        std::memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        std::memcpy(&bits, &magnitude, 4);
        return uint16_t(sign | (bits - 0x3f000000u));
    }
    bits += 0xfffu + ((bits >> 13) & 1u);
    return uint16_t(sign | ((bits - 0x38000000u) >> 13));
}

#endif

} // namespace kvmem
