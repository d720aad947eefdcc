// One strip of the scorer: up to max_vectors x lanes query rows of one KV head against all candidates.
//
// Vectors run over query rows and the index is the broadcast operand, so Mean-K rows are read as they lie (any subset
// of blocks costs the same), the maximum and the sum of the softmax need no shuffles, and one GEMM pass is enough:
// each tile keeps exp2(s - its own maximum), and a second pass over the kept weights multiplies them by
// exp2(tile maximum - row maximum) / row sum.
#pragma once

#include <cstdint>

namespace kvmem {

// Index rows widened to float32 at a time: a multiple of every blocks-per-step below, and of a size for the L2 cache.
constexpr int64_t panel_blocks = 96;

struct strip_args {
    const uint16_t * const * chunks;
    const int64_t * candidates; // [n]
    int64_t n;
    int64_t tile;
    int64_t mean_offset; // of the KV head, in elements of one index row
    int32_t chunk_shift;
    int32_t d;
    int32_t n_rows;      // <= n_vectors * lanes
    int32_t n_vectors;
    const float * q;     // [d][n_vectors * lanes], times scale * log2(e); zero in the lanes beyond n_rows
    float * panel;       // [panel_blocks][d]
    float * weights;     // [n][n_vectors * lanes]
    float * tile_top;    // [tiles][n_vectors * lanes]
    float * tile_sum;    // [tiles][n_vectors * lanes]
    float * part;        // out [n]: sum over the rows of their softmax
};

struct strip_kernel {
    int lanes;
    int max_vectors;
    void (*run)(const strip_args & args);
};

const strip_kernel & strip_kernel_for(int isa);
extern const strip_kernel strip_kernel_portable;
extern const strip_kernel strip_kernel_avx2;
extern const strip_kernel strip_kernel_avx512;

} // namespace kvmem
