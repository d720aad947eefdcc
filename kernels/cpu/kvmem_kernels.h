// libkvmem_kernels: the hot loops of kvmem_llama on the CPU. Mean-K of a block, block scores, restore of K and V.
//
// Rules of the C API
//   * no state between calls, no dependency on ggml; threads live inside one call
//   * int32 results: 0 is success, < 0 is one of enum kvmem_kernels_error; nothing throws, nothing aborts
//   * the instruction set is chosen at run time; KVMEM_ISA_AUTO is the best one this CPU has
//   * results do not depend on n_threads, bit for bit
//
// The index is a list of chunks of 1 << chunk_shift blocks, float16. A chunk holds, for every scored layer and then
// every KV head of it, the Mean-K of all its blocks one after the other: [layer][kv head][block of the chunk][d].
// "mean_offset" of a layer is the sum of n_head_kv * d over the layers before it, in elements.
//
// A token index holds, in place of a mean, the raw K of every token of a block in one of ggml's block formats:
// [KV head][block of the chunk][token][bytes of a row], for a few KV heads. The "head offset" of a KV head is the number
// of bytes of a block in the heads before it. Blocks have block_tokens tokens; those a block lacks are never read.
#pragma once

#include <stdint.h>

#if defined(_WIN32)
#define KVMEM_KERNELS_API __declspec(dllexport)
#else
#define KVMEM_KERNELS_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define KVMEM_KERNELS_ABI 2

enum kvmem_kernels_error {
    KVMEM_KERNELS_OK         = 0,
    KVMEM_KERNELS_E_ARGUMENT = -1, // a number is out of range or a pointer is NULL
    KVMEM_KERNELS_E_MEMORY   = -2, // out of memory
    KVMEM_KERNELS_E_ISA      = -3, // the instruction set asked for is not one of this CPU
};

enum kvmem_isa {
    KVMEM_ISA_AUTO     = 0,
    KVMEM_ISA_PORTABLE = 1, // plain vectors of 4 floats: SSE2, NEON
    KVMEM_ISA_AVX2     = 2, // with FMA and F16C
    KVMEM_ISA_AVX512   = 3, // F, VL, BW, DQ
};

enum kvmem_row_type { // the numbers of enum ggml_type
    KVMEM_ROW_F32 = 0,
    KVMEM_ROW_F16 = 1,
};

enum kvmem_index_type { // the numbers of enum ggml_type
    KVMEM_INDEX_MEAN_F16    = 1, // one mean for a block
    KVMEM_INDEX_TOKENS_Q4_0 = 2, // a row for every token; heads of a multiple of 32 dims
    KVMEM_INDEX_TOKENS_Q8_0 = 8,
};

KVMEM_KERNELS_API int32_t      kvmem_kernels_abi(void);
KVMEM_KERNELS_API int32_t      kvmem_kernels_isa(void); // what KVMEM_ISA_AUTO stands for here
KVMEM_KERNELS_API const char * kvmem_kernels_isa_name(int32_t isa);

// ---- Mean-K -------------------------------------------------------------------------------------------------------

struct kvmem_mean_layer {
    int64_t k_offset;    // bytes from the record's start to the layer's first raw K row
    int64_t k_stride;    // bytes from one token's row to the next
    int64_t mean_offset; // elements, see above
    int32_t n_head_kv;
    int32_t d;
};

// Mean of the first `count` raw K rows of `record`, float64 sums added row by row, rounded once to float16
// (ties to even; values beyond its range become +-65504, NaN stays), stored as block `row` of `chunk`.
KVMEM_KERNELS_API int32_t kvmem_mean_k(
        const struct kvmem_mean_layer * layers, int32_t n_layers, int32_t row_type,
        const uint8_t * record, int32_t count, uint16_t * chunk, int32_t chunk_shift, int64_t row);

// Mean-K of `blocks` (any order) of one layer -> dst [n_head_kv][n_blocks][d] float16.
KVMEM_KERNELS_API int32_t kvmem_gather_means(
        const uint16_t * const * chunks, int64_t n_chunks, int32_t chunk_shift,
        int64_t mean_offset, int32_t n_head_kv, int32_t d,
        const int64_t * blocks, int64_t n_blocks, uint16_t * dst);

// ---- token index --------------------------------------------------------------------------------------------------

struct kvmem_token_head {
    int64_t k_offset;    // bytes from the record's start to the KV head's dims in the first raw K row
    int64_t k_stride;    // bytes from one token's row to the next
    int64_t head_offset; // bytes of a block in the index that come before this head's
    int32_t d;           // a multiple of 32
};

// Bytes of one token's row of d dims; 0 if d or the type is none of a token index.
KVMEM_KERNELS_API int64_t kvmem_token_row_bytes(int32_t index_type, int32_t d);

// The first `count` raw K rows of `record`, quantized as ggml does it, become block `row` of `chunk`. A group of 32
// that holds an infinity or a NaN becomes zeros.
KVMEM_KERNELS_API int32_t kvmem_token_rows(
        const struct kvmem_token_head * heads, int32_t n_heads, int32_t row_type,
        const uint8_t * record, int32_t count, int32_t index_type, int32_t block_tokens,
        uint8_t * chunk, int32_t chunk_shift, int64_t row);

// ---- block scores -------------------------------------------------------------------------------------------------

struct kvmem_score_layer {
    const float * q;     // [n_query][n_head][d], before RoPE
    double  scale;       // what multiplies q.k before the softmax
    int64_t mean_offset; // elements, see above; of a token index: head offset of the only KV head, bytes
    int32_t n_head;      // a multiple of n_head_kv; query head h reads KV head h / (n_head / n_head_kv)
    int32_t n_head_kv;
    int32_t d;
};

struct kvmem_score_args {
    const struct kvmem_score_layer * layers;
    const void * const * chunks;
    const int64_t * candidates; // block numbers, strictly ascending
    const int32_t * counts;     // [n_candidates] tokens of each; only for a token index
    double  * scores;           // out [n_candidates]
    int64_t n_chunks;
    int64_t n_candidates;
    int64_t tile;               // blocks per softmax tile; 0 = 96, or 8 of tokens. Any value gives the same scores
                                // up to rounding
    int32_t index_type;         // enum kvmem_index_type
    int32_t block_tokens;       // only for a token index
    int32_t n_layers;
    int32_t n_query;            // tokens, >= 1
    int32_t chunk_shift;
    int32_t n_threads;
    int32_t isa;
};

// score[c] = sum over query tokens, mean over (layer, query head), of the softmax over the candidates of
// scale * q . Mean-K (Eq. 10 of the paper). One candidate scores exactly n_query.
// With a token index the softmax runs over the tokens of all candidates, and a block's part is that of its tokens: a
// block counts as the log-sum-exp of scale * q . k over them.
// Memory beside the arguments, per thread and at the default tile: 256 bytes x n_candidates of weights, but no more
// than max(64 MiB, 64 bytes x n_candidates); 16 bytes x n_candidates; 640 bytes x the largest d.
// A token index takes 2048 bytes x block_tokens more.
KVMEM_KERNELS_API int32_t kvmem_score(const struct kvmem_score_args * args);

// ---- restore ------------------------------------------------------------------------------------------------------

enum kvmem_pairing {
    KVMEM_PAIR_ADJACENT = 0, // (2i, 2i+1): llama.cpp's NORM
    KVMEM_PAIR_HALVES   = 1, // (i, i + n_dims/2): llama.cpp's NEOX and the M-RoPE forms
};

// How y0 = x0*cos - x1*sin and y1 = x0*sin + x1*cos are rounded. A compiler may contract either product into an FMA;
// the caller picks the form that equals ggml's own rope on this machine byte for byte.
enum kvmem_rope_form {
    KVMEM_ROPE_PLAIN = 0, // four products, each rounded
    KVMEM_ROPE_FMA_AA = 1, // y0 = fma(x0, cos, -(x1*sin)), y1 = fma(x0, sin, x1*cos)
    KVMEM_ROPE_FMA_AB = 2, // y0 as above,                  y1 = fma(x1, cos, x0*sin)
    KVMEM_ROPE_FMA_BA = 3, // y0 = fma(-x1, sin, x0*cos),   y1 = fma(x0, sin, x1*cos)
    KVMEM_ROPE_FMA_BB = 4, // y0 = fma(-x1, sin, x0*cos),   y1 = fma(x1, cos, x0*sin)
};

struct kvmem_restore_layer {
    int64_t k_offset;      // bytes from the record's start to the layer's raw K of slot 0
    int64_t k_stride;      // bytes from one slot's raw K to the next
    int64_t v_offset;      // the same for V
    int64_t v_row;         // bytes of one token's V, in records and in cells alike
    const float * cos_sin; // [n_positions][n_dims/2][2], unused when n_dims is 0
    uint8_t * k_cells;     // K of cell 0: n_head_kv * d float16
    uint8_t * v_cells;     // V of cell 0
    int64_t k_cell_stride; // bytes from one cell to the next
    int64_t v_cell_stride;
    int64_t n_positions;
    int32_t n_head_kv;
    int32_t d;
    int32_t n_dims;        // rotated dims of a head, even; 0 = a layer without rotation
    int32_t rot0;          // first rotated dim
    int32_t pairing;       // enum kvmem_pairing
};

struct kvmem_restore_block {
    const uint8_t * record;
    const int32_t * cells; // [n], distinct over the whole call
    int32_t slot0;         // first slot of the record
    int32_t n;             // tokens
    int32_t pos0;          // view position of the first; consecutive from there
};

// raw K -> rotation at the token's view position -> float16 cell; V bytes -> cell. Everything is checked before
// the first byte is written.
KVMEM_KERNELS_API int32_t kvmem_restore_f16(
        const struct kvmem_restore_layer * layers, int32_t n_layers, int32_t row_type,
        const struct kvmem_restore_block * blocks, int32_t n_blocks, int64_t n_cells,
        int32_t form, int32_t n_threads, int32_t isa);

#ifdef __cplusplus
}
#endif
