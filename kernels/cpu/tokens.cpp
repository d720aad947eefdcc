// Rows of the token index: raw K of a block's tokens, quantized as ggml's Q4_0 and Q8_0.
#include "kvmem_kernels.h"
#include "simd.h"

#include <cmath>
#include <cstring>

namespace kvmem {
namespace {

constexpr int group = 32; // dims that share a scale

int64_t group_bytes(int32_t index_type) {
    switch (index_type) {
        case KVMEM_INDEX_TOKENS_Q4_0: return 2 + group / 2;
        case KVMEM_INDEX_TOKENS_Q8_0: return 2 + group;
        default: return 0;
    }
}

void put_scale(float scale, uint8_t * out) {
    const uint16_t half = float_to_half(scale);
    std::memcpy(out, &half, 2);
}

// The value of the largest magnitude becomes -8; the first half of the dims goes to the low nibbles.
void quantize_q4_0(const float * x, uint8_t * out) {
    float largest = 0.0f;
    for (int i = 0; i < group; ++i) {
        largest = std::fabs(x[i]) > std::fabs(largest) ? x[i] : largest;
    }
    const float scale = largest / -8.0f, inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
    put_scale(scale, out);
    for (int i = 0; i < group / 2; ++i) {
        const int low = int(x[i] * inverse + 8.5f), high = int(x[i + group / 2] * inverse + 8.5f);
        out[2 + i] = uint8_t((low > 15 ? 15 : low) | (high > 15 ? 15 : high) << 4);
    }
}

void quantize_q8_0(const float * x, uint8_t * out) {
    float largest = 0.0f;
    for (int i = 0; i < group; ++i) {
        largest = std::fmax(largest, std::fabs(x[i]));
    }
    const float scale = largest / 127.0f, inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
    put_scale(scale, out);
    for (int i = 0; i < group; ++i) {
        out[2 + i] = uint8_t(int8_t(std::round(x[i] * inverse)));
    }
}

void read_group(const uint8_t * row, int32_t row_type, int64_t first, float * x) {
    bool finite = true;
    for (int i = 0; i < group; ++i) {
        if (row_type == KVMEM_ROW_F16) {
            uint16_t half;
            std::memcpy(&half, row + (first + i) * 2, 2);
            x[i] = half_to_float(half);
        } else {
            std::memcpy(&x[i], row + (first + i) * 4, 4);
        }
        finite = finite && std::isfinite(x[i]);
    }
    if (!finite) {
        std::memset(x, 0, sizeof(float) * group);
    }
}

} // namespace
} // namespace kvmem

int64_t kvmem_token_row_bytes(int32_t index_type, int32_t d) {
    return d < 1 || d % kvmem::group ? 0 : int64_t(d / kvmem::group) * kvmem::group_bytes(index_type);
}

int32_t kvmem_token_rows(
        const struct kvmem_token_head * heads, int32_t n_heads, int32_t row_type,
        const uint8_t * record, int32_t count, int32_t index_type, int32_t block_tokens,
        uint8_t * chunk, int32_t chunk_shift, int64_t row) {
    using namespace kvmem;
    if (!heads || n_heads < 0 || (row_type != KVMEM_ROW_F32 && row_type != KVMEM_ROW_F16) || !record || count < 1 ||
        count > block_tokens || !chunk || chunk_shift < 0 || chunk_shift > 30 || row < 0 || row >> chunk_shift) {
        return KVMEM_KERNELS_E_ARGUMENT;
    }
    const int64_t element = row_type == KVMEM_ROW_F16 ? 2 : 4;
    for (int32_t h = 0; h < n_heads; ++h) {
        const kvmem_token_head & head = heads[h];
        if (!kvmem_token_row_bytes(index_type, head.d) || head.k_offset < 0 || head.head_offset < 0 ||
            head.k_stride < head.d * element) {
            return KVMEM_KERNELS_E_ARGUMENT;
        }
    }
    for (int32_t h = 0; h < n_heads; ++h) {
        const kvmem_token_head & head = heads[h];
        const int64_t row_bytes = kvmem_token_row_bytes(index_type, head.d);
        uint8_t * out = chunk + (head.head_offset << chunk_shift) + row * block_tokens * row_bytes;
        for (int32_t t = 0; t < count; ++t) {
            const uint8_t * source = record + head.k_offset + t * head.k_stride;
            for (int32_t first = 0; first < head.d; first += group, out += group_bytes(index_type)) {
                float x[group];
                read_group(source, row_type, first, x);
                if (index_type == KVMEM_INDEX_TOKENS_Q4_0) {
                    quantize_q4_0(x, out);
                } else {
                    quantize_q8_0(x, out);
                }
            }
        }
    }
    return KVMEM_KERNELS_OK;
}
