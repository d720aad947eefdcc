"""C declarations of the memory hooks, the same as in patches/llama-kvmem.h (a test holds the two equal)."""

from __future__ import annotations

ABI_VERSION = 1

CDEF = """
struct llama_context;
struct llama_kvmem;
enum kvmem_error {
    KVMEM_OK = 0,
    KVMEM_E_ARGUMENT = -1,
    KVMEM_E_UNSUPPORTED = -2,
    KVMEM_E_STATE = -3,
    KVMEM_E_COMPUTE = -4,
    KVMEM_E_INTERNAL = -5,
};
enum kvmem_capture_flags {
    KVMEM_CAPTURE_K = 1,
    KVMEM_CAPTURE_Q = 2,
};
enum kvmem_layer_status {
    KVMEM_LAYER_UNSEEN = 0,
    KVMEM_LAYER_ROPE = 1,
    KVMEM_LAYER_NOPE = 2,
    KVMEM_LAYER_UNSUPPORTED = 3,
};
struct kvmem_params {
    int32_t n_rows;
    int32_t block_size;
    int32_t raw_k_type;
};
struct kvmem_layer_info {
    int32_t il;
    int32_t cache;
    int32_t status;
    int32_t n_head;
    int32_t n_head_kv;
    int32_t d_k;
    int32_t d_v;
    int32_t type_k;
    int32_t type_v;
    int32_t k_rotated;
    int32_t rope[16];
    int32_t rope_factors;
    float scale;
    int32_t q_temperature;
    int64_t raw_k_row;
    int64_t k_row;
    int64_t v_row;
    int64_t k_offset;
    int64_t v_offset;
    void * k_base;
    void * v_base;
    const char * reason;
};
struct kvmem_block_write {
    const uint8_t * record;
    const int32_t * cells;
    const int32_t * tokens;
    int32_t slot0;
    int32_t n;
    int32_t pos0;
};
int32_t kvmem_abi_version(void);
const char * kvmem_patch_id(void);
int64_t kvmem_struct_size(const char * name);
int32_t kvmem_init(struct llama_context * ctx, struct kvmem_params params, struct llama_kvmem ** out,
        char * err, int32_t n_err);
void kvmem_free(struct llama_kvmem * km);
const char * kvmem_last_error(const struct llama_kvmem * km);
int32_t kvmem_n_layer(const struct llama_kvmem * km);
int32_t kvmem_layer(const struct llama_kvmem * km, int32_t i, struct kvmem_layer_info * out);
int64_t kvmem_record_bytes(const struct llama_kvmem * km);
int32_t kvmem_n_cells(const struct llama_kvmem * km);
int32_t kvmem_set_exact(struct llama_kvmem * km, int32_t on);
int32_t kvmem_capture(struct llama_kvmem * km, uint32_t flags);
int32_t kvmem_captured(struct llama_kvmem * km, int32_t * seq, int32_t * pos, int32_t n_max);
int32_t kvmem_read_q(struct llama_kvmem * km, int32_t layer, const int32_t * rows, int32_t n, float * dst);
int32_t kvmem_read_k(struct llama_kvmem * km, int32_t layer, const int32_t * rows, int32_t n, void * dst);
int32_t kvmem_stage_out(struct llama_kvmem * km, uint8_t * record, int32_t slot0, const int32_t * rows,
        const int32_t * cells, int32_t n);
int32_t kvmem_place(struct llama_kvmem * km, const int32_t * cells, int32_t n);
int32_t kvmem_cells(struct llama_kvmem * km, int32_t * pos, int32_t * seq, int32_t n_max);
int32_t kvmem_free_cells(struct llama_kvmem * km, const int32_t * cells, int32_t n);
int32_t kvmem_show_cells(struct llama_kvmem * km, int32_t seq, const int32_t * cells,
        const int32_t * pos, const int32_t * tokens, int32_t n);
int32_t kvmem_move_cells(struct llama_kvmem * km, int32_t seq, const int32_t * cells,
        const int32_t * pos, int32_t n);
int32_t kvmem_write_blocks(struct llama_kvmem * km, int32_t seq,
        const struct kvmem_block_write * blocks, int32_t n_blocks);
int32_t kvmem_read_rows(struct llama_kvmem * km, int32_t layer, int32_t is_v, const int32_t * cells,
        int32_t n, void * dst);
int32_t kvmem_read_raw_k(struct llama_kvmem * km, int32_t layer, const int32_t * cells, int32_t n,
        float * dst);
int32_t kvmem_rotate(struct llama_kvmem * km, int32_t layer, int32_t n_head, const int32_t * pos, int32_t n,
        const float * src, float * dst);
"""
