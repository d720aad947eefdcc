// Mean-K of one block from its record, and copies of means out of the index.
#include "kvmem_kernels.h"
#include "mean.h"
#include "simd.h"

#include <cmath>
#include <cstring>
#include <exception>
#include <vector>

namespace kvmem {
namespace {

void add_f32(double * sum, const uint8_t * row, int64_t n) {
    const float * x = reinterpret_cast<const float *>(row);
    for (int64_t i = 0; i < n; ++i) {
        sum[i] += double(x[i]);
    }
}

void add_f16(double * sum, const uint8_t * row, int64_t n) {
    const uint16_t * x = reinterpret_cast<const uint16_t *>(row);
    for (int64_t i = 0; i < n; ++i) {
        sum[i] += double(half_to_float(x[i]));
    }
}

add_row_fn add_row(int32_t row_type) {
#if KVMEM_X86
    if (best_isa() >= KVMEM_ISA_AVX2) {
        return row_type == KVMEM_ROW_F16 ? add_row_avx2.f16 : add_row_avx2.f32;
    }
#endif
    return row_type == KVMEM_ROW_F16 ? add_f16 : add_f32;
}

// Rounded once. The float on the way is rounded to odd (the last bit says "there was more"), so the second rounding
// sees which side of a tie the value was on.
uint16_t mean_to_half(double mean) {
    mean = mean > 65504.0 ? 65504.0 : mean < -65504.0 ? -65504.0 : mean;
    float f = float(mean);
    if (double(f) < mean || double(f) > mean) {
        uint32_t bits;
        std::memcpy(&bits, &f, 4);
        if (std::fabs(double(f)) > std::fabs(mean)) {
            --bits;
        }
        bits |= 1u;
        std::memcpy(&f, &bits, 4);
    }
    return float_to_half(f);
}

bool valid_row_type(int32_t row_type) { return row_type == KVMEM_ROW_F32 || row_type == KVMEM_ROW_F16; }

} // namespace
} // namespace kvmem

int32_t kvmem_mean_k(
        const struct kvmem_mean_layer * layers, int32_t n_layers, int32_t row_type,
        const uint8_t * record, int32_t count, uint16_t * chunk, int32_t chunk_shift, int64_t row) {
    using namespace kvmem;
    if (!layers || n_layers < 0 || !valid_row_type(row_type) || !record || count < 1 || !chunk || chunk_shift < 0 ||
        chunk_shift > 30 || row < 0 || row >> chunk_shift) {
        return KVMEM_KERNELS_E_ARGUMENT;
    }
    const int64_t element = row_type == KVMEM_ROW_F16 ? 2 : 4;
    for (int32_t i = 0; i < n_layers; ++i) {
        const kvmem_mean_layer & l = layers[i];
        if (l.n_head_kv < 1 || l.d < 1 || l.k_offset < 0 || l.mean_offset < 0 ||
            l.k_stride < int64_t(l.n_head_kv) * l.d * element) {
            return KVMEM_KERNELS_E_ARGUMENT;
        }
    }
    const add_row_fn add = add_row(row_type);
    try {
        std::vector<double> sum;
        for (int32_t i = 0; i < n_layers; ++i) {
            const kvmem_mean_layer & l = layers[i];
            const int64_t n = int64_t(l.n_head_kv) * l.d;
            sum.assign(size_t(n), 0.0);
            for (int32_t t = 0; t < count; ++t) {
                add(sum.data(), record + l.k_offset + t * l.k_stride, n);
            }
            for (int32_t h = 0; h < l.n_head_kv; ++h) {
                uint16_t * mean = chunk + ((l.mean_offset + int64_t(h) * l.d) << chunk_shift) + row * l.d;
                for (int32_t k = 0; k < l.d; ++k) {
                    mean[k] = mean_to_half(sum[size_t(int64_t(h) * l.d + k)] / double(count));
                }
            }
        }
    } catch (const std::exception &) {
        return KVMEM_KERNELS_E_MEMORY;
    }
    return KVMEM_KERNELS_OK;
}

int32_t kvmem_gather_means(
        const uint16_t * const * chunks, int64_t n_chunks, int32_t chunk_shift,
        int64_t mean_offset, int32_t n_head_kv, int32_t d,
        const int64_t * blocks, int64_t n_blocks, uint16_t * dst) {
    if (n_blocks < 0 || chunk_shift < 0 || chunk_shift > 30 || mean_offset < 0 || n_head_kv < 1 || d < 1 ||
        (n_blocks > 0 && (!chunks || !blocks || !dst))) {
        return KVMEM_KERNELS_E_ARGUMENT;
    }
    for (int64_t i = 0; i < n_blocks; ++i) {
        if (blocks[i] < 0 || blocks[i] >> chunk_shift >= n_chunks) {
            return KVMEM_KERNELS_E_ARGUMENT;
        }
    }
    const int64_t in_chunk = (int64_t(1) << chunk_shift) - 1;
    for (int32_t h = 0; h < n_head_kv; ++h) {
        const int64_t head = (mean_offset + int64_t(h) * d) << chunk_shift;
        for (int64_t i = 0; i < n_blocks; ++i) {
            const uint16_t * mean = chunks[blocks[i] >> chunk_shift] + head + (blocks[i] & in_chunk) * d;
            std::memcpy(dst + (h * n_blocks + i) * d, mean, size_t(d) * 2);
        }
    }
    return KVMEM_KERNELS_OK;
}
