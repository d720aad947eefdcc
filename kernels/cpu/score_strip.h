// One strip of the scorer: up to max_vectors x lanes query rows of one KV head against all candidates.
//
// Vectors run over query rows and the index is the broadcast operand, so Mean-K rows are read as they lie (any subset
// of blocks costs the same), the maximum and the sum of the softmax need no shuffles, and one GEMM pass is enough:
// each tile keeps exp2(s - its own maximum), and a second pass over the kept weights multiplies them by
// exp2(tile maximum - row maximum) / row sum.
//
// Over a token index the same is done with the tokens of the candidates; only their sums by block are kept.
#pragma once

#include <cstdint>

namespace kvmem {

// Index rows widened to float32 at a time: a multiple of every blocks-per-step below, and of a size for the L2 cache.
constexpr int64_t panel_blocks = 96;

constexpr int64_t panel_spare = 24; // rows that the last blocks-per-step may read beyond

struct strip_args {
    const void * const * chunks;
    const int64_t * candidates; // [n]
    const int32_t * counts;     // [n] tokens, of a token index
    int64_t n;
    int64_t tile;
    int64_t mean_offset; // of the KV head, in elements of one index row; bytes of a token index
    int64_t row_bytes;   // of a token
    int32_t chunk_shift;
    int32_t block_tokens;
    int32_t index_type;
    int32_t d;
    int32_t n_rows;      // <= n_vectors * lanes
    int32_t n_vectors;
    const float * q;     // [d][n_vectors * lanes], times scale * log2(e); zero in the lanes beyond n_rows
    float * panel;       // [panel_blocks][d], of a token index [block_tokens + panel_spare][d]
    float * logits;      // [tile * block_tokens][n_vectors * lanes], of a token index
    float * weights;     // [n][n_vectors * lanes]
    float * tile_top;    // [tiles][n_vectors * lanes]
    float * tile_sum;    // [tiles][n_vectors * lanes]
    float * part;        // out [n]: sum over the rows of their softmax
};

struct strip_kernel {
    int lanes;
    int max_vectors;
    void (*run)(const strip_args & args);
    void (*run_tokens)(const strip_args & args);
};

const strip_kernel & strip_kernel_for(int isa);
extern const strip_kernel strip_kernel_portable;
extern const strip_kernel strip_kernel_avx2;
extern const strip_kernel strip_kernel_avx512;

} // namespace kvmem
