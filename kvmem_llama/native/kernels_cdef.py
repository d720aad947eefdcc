"""C declarations of libkvmem_kernels, those of kernels/cpu/kvmem_kernels.h (a test holds the two equal)."""

from __future__ import annotations

KERNELS_ABI = 2

KERNELS_CDEF = """
enum kvmem_kernels_error {
    KVMEM_KERNELS_OK = 0,
    KVMEM_KERNELS_E_ARGUMENT = -1,
    KVMEM_KERNELS_E_MEMORY = -2,
    KVMEM_KERNELS_E_ISA = -3,
};
enum kvmem_isa {
    KVMEM_ISA_AUTO = 0,
    KVMEM_ISA_PORTABLE = 1,
    KVMEM_ISA_AVX2 = 2,
    KVMEM_ISA_AVX512 = 3,
};
enum kvmem_row_type {
    KVMEM_ROW_F32 = 0,
    KVMEM_ROW_F16 = 1,
};
enum kvmem_index_type {
    KVMEM_INDEX_MEAN_F16 = 1,
    KVMEM_INDEX_TOKENS_Q4_0 = 2,
    KVMEM_INDEX_TOKENS_Q8_0 = 8,
};
int32_t kvmem_kernels_abi(void);
int32_t kvmem_kernels_isa(void);
const char * kvmem_kernels_isa_name(int32_t isa);
struct kvmem_mean_layer {
    int64_t k_offset;
    int64_t k_stride;
    int64_t mean_offset;
    int32_t n_head_kv;
    int32_t d;
};
int32_t kvmem_mean_k(
        const struct kvmem_mean_layer * layers, int32_t n_layers, int32_t row_type,
        const uint8_t * record, int32_t count, uint16_t * chunk, int32_t chunk_shift, int64_t row);
int32_t kvmem_gather_means(
        const uint16_t * const * chunks, int64_t n_chunks, int32_t chunk_shift,
        int64_t mean_offset, int32_t n_head_kv, int32_t d,
        const int64_t * blocks, int64_t n_blocks, uint16_t * dst);
struct kvmem_token_head {
    int64_t k_offset;
    int64_t k_stride;
    int64_t head_offset;
    int32_t d;
};
int64_t kvmem_token_row_bytes(int32_t index_type, int32_t d);
int32_t kvmem_token_rows(
        const struct kvmem_token_head * heads, int32_t n_heads, int32_t row_type,
        const uint8_t * record, int32_t count, int32_t index_type, int32_t block_tokens,
        uint8_t * chunk, int32_t chunk_shift, int64_t row);
struct kvmem_score_layer {
    const float * q;
    double scale;
    int64_t mean_offset;
    int32_t n_head;
    int32_t n_head_kv;
    int32_t d;
};
struct kvmem_score_args {
    const struct kvmem_score_layer * layers;
    const void * const * chunks;
    const int64_t * candidates;
    const int32_t * counts;
    double * scores;
    int64_t n_chunks;
    int64_t n_candidates;
    int64_t tile;
    int32_t index_type;
    int32_t block_tokens;
    int32_t n_layers;
    int32_t n_query;
    int32_t chunk_shift;
    int32_t n_threads;
    int32_t isa;
};
int32_t kvmem_score(const struct kvmem_score_args * args);
enum kvmem_pairing {
    KVMEM_PAIR_ADJACENT = 0,
    KVMEM_PAIR_HALVES = 1,
};
enum kvmem_rope_form {
    KVMEM_ROPE_PLAIN = 0,
    KVMEM_ROPE_FMA_AA = 1,
    KVMEM_ROPE_FMA_AB = 2,
    KVMEM_ROPE_FMA_BA = 3,
    KVMEM_ROPE_FMA_BB = 4,
};
struct kvmem_restore_layer {
    int64_t k_offset;
    int64_t k_stride;
    int64_t v_offset;
    int64_t v_row;
    const float * cos_sin;
    uint8_t * k_cells;
    uint8_t * v_cells;
    int64_t k_cell_stride;
    int64_t v_cell_stride;
    int64_t n_positions;
    int32_t n_head_kv;
    int32_t d;
    int32_t n_dims;
    int32_t rot0;
    int32_t pairing;
};
struct kvmem_restore_block {
    const uint8_t * record;
    const int32_t * cells;
    int32_t slot0;
    int32_t n;
    int32_t pos0;
};
int32_t kvmem_restore_f16(
        const struct kvmem_restore_layer * layers, int32_t n_layers, int32_t row_type,
        const struct kvmem_restore_block * blocks, int32_t n_blocks, int64_t n_cells,
        int32_t form, int32_t n_threads, int32_t isa);
"""
