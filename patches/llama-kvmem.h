// Memory hooks of kvmem_llama: capture of raw K and raw Q, explicit cells, re-positioning, rebuild from records.
//
// Rules of the C API
//   * one llama_kvmem per llama_context; every call on the thread that decodes, between llama_decode calls
//   * int32 results: >= 0 is success, < 0 is one of enum kvmem_error with a text in kvmem_last_error()
//   * nothing aborts, nothing is process-global
//   * a sliding-window model holds two caches of equal size (swa_full); a cell number addresses the same row in both
#pragma once

#include "llama.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVMEM_ABI_VERSION 1

struct llama_kvmem;

enum kvmem_error {
    KVMEM_OK            =  0,
    KVMEM_E_ARGUMENT    = -1, // an index, a size or a pointer is out of range
    KVMEM_E_UNSUPPORTED = -2, // the model or the context cannot be served; the text says why
    KVMEM_E_STATE       = -3, // a cell is occupied or empty when it must not be, rows were overwritten
    KVMEM_E_COMPUTE     = -4, // the backend failed
    KVMEM_E_INTERNAL    = -5, // a C++ exception; the text is its message
};

enum kvmem_capture_flags {
    KVMEM_CAPTURE_K = 1, // raw K of every token of the next batches
    KVMEM_CAPTURE_Q = 2, // raw Q too, full-attention layers only
};

enum kvmem_layer_status {
    KVMEM_LAYER_UNSEEN      = 0, // no graph has reached it
    KVMEM_LAYER_ROPE        = 1,
    KVMEM_LAYER_NOPE        = 2, // attention without positions
    KVMEM_LAYER_UNSUPPORTED = 3, // raw K not found behind the rotation, see kvmem_layer_info.reason
};

struct kvmem_params {
    int32_t n_rows;     // capture rows, >= the largest batch
    int32_t block_size; // tokens of one record
    int32_t raw_k_type; // enum ggml_type of raw K in records: F16 or F32
};

struct kvmem_layer_info {
    int32_t il;         // layer number in the model
    int32_t cache;      // 0 full attention, 1 sliding window
    int32_t status;     // enum kvmem_layer_status
    int32_t n_head;
    int32_t n_head_kv;
    int32_t d_k;        // K head size
    int32_t d_v;        // V head size
    int32_t type_k;     // enum ggml_type of the cache
    int32_t type_v;
    int32_t k_rotated;  // 1: the graph applies a Hadamard rotation to K before it is stored
    int32_t rope[16];   // op_params of the captured ROPE node
    int32_t rope_factors; // 1: the node has frequency factors
    float   scale;      // attention scale x what the graph multiplies Q by after RoPE
    int32_t q_temperature; // 1: Q is also multiplied by a per-token temperature
    int64_t raw_k_row;  // bytes of one token's raw K in a record
    int64_t k_row;      // bytes of one token's K in a cell
    int64_t v_row;      // bytes of one token's V in a cell
    int64_t k_offset;   // of the layer's K in a record: [block_size][raw_k_row]
    int64_t v_offset;   // of the layer's V in a record: [block_size][v_row]
    void  * k_base;     // host address of cell 0, or NULL when the cache is not in host memory
    void  * v_base;
    const char * reason;
};

struct kvmem_block_write {
    const uint8_t * record;
    const int32_t * cells;  // [n]
    const int32_t * tokens; // [n] token ids
    int32_t slot0;          // first slot of the record
    int32_t n;              // tokens
    int32_t pos0;           // view position of the first; consecutive from there
};

LLAMA_API int32_t      kvmem_abi_version(void);
LLAMA_API const char * kvmem_patch_id(void);
LLAMA_API int64_t      kvmem_struct_size(const char * name); // -1 for an unknown name

// Attach to a context. On failure *out stays NULL and err holds a text.
LLAMA_API int32_t kvmem_init(struct llama_context * ctx, struct kvmem_params params, struct llama_kvmem ** out, char * err, int32_t n_err);
LLAMA_API void    kvmem_free(struct llama_kvmem * km); // before llama_free
LLAMA_API const char * kvmem_last_error(const struct llama_kvmem * km);

LLAMA_API int32_t kvmem_n_layer(const struct llama_kvmem * km);
LLAMA_API int32_t kvmem_layer(const struct llama_kvmem * km, int32_t i, struct kvmem_layer_info * out);
LLAMA_API int64_t kvmem_record_bytes(const struct llama_kvmem * km);
LLAMA_API int32_t kvmem_n_cells(const struct llama_kvmem * km);
LLAMA_API int32_t kvmem_set_exact(struct llama_kvmem * km, int32_t on); // reference kernels on the CPU backend

// Capture. The rows of the next batch start at row 0; kvmem_captured gives their sequence and position in batch order.
LLAMA_API int32_t kvmem_capture(struct llama_kvmem * km, uint32_t flags);
LLAMA_API int32_t kvmem_captured(struct llama_kvmem * km, int32_t * seq, int32_t * pos, int32_t n_max); // -> rows
LLAMA_API int32_t kvmem_read_q(struct llama_kvmem * km, int32_t layer, const int32_t * rows, int32_t n, float * dst); // [n][n_head][d_k]
LLAMA_API int32_t kvmem_read_k(struct llama_kvmem * km, int32_t layer, const int32_t * rows, int32_t n, void * dst);  // [n][raw_k_row]

// Raw K of capture rows and V of cells -> slots slot0 .. slot0+n-1 of a record.
LLAMA_API int32_t kvmem_stage_out(struct llama_kvmem * km, uint8_t * record, int32_t slot0, const int32_t * rows, const int32_t * cells, int32_t n);

// Cells. place: cells of exactly the tokens of the next batch, all empty; n = 0 gives the choice back to llama.cpp.
LLAMA_API int32_t kvmem_place(struct llama_kvmem * km, const int32_t * cells, int32_t n);
LLAMA_API int32_t kvmem_cells(struct llama_kvmem * km, int32_t * pos, int32_t * seq, int32_t n_max); // [n_cells], -1 = empty
LLAMA_API int32_t kvmem_free_cells(struct llama_kvmem * km, const int32_t * cells, int32_t n);       // metadata only
LLAMA_API int32_t kvmem_show_cells(struct llama_kvmem * km, int32_t seq, const int32_t * cells, const int32_t * pos, const int32_t * tokens, int32_t n);
LLAMA_API int32_t kvmem_move_cells(struct llama_kvmem * km, int32_t seq, const int32_t * cells, const int32_t * pos, int32_t n); // delta RoPE
LLAMA_API int32_t kvmem_write_blocks(struct llama_kvmem * km, int32_t seq, const struct kvmem_block_write * blocks, int32_t n_blocks);
LLAMA_API int32_t kvmem_read_rows(struct llama_kvmem * km, int32_t layer, int32_t is_v, const int32_t * cells, int32_t n, void * dst); // cell bytes
LLAMA_API int32_t kvmem_read_raw_k(struct llama_kvmem * km, int32_t layer, const int32_t * cells, int32_t n, float * dst); // rotation undone

// The layer's own rotation over rows of the caller: src and dst [n][n_head][d_k], row i at position pos[i].
LLAMA_API int32_t kvmem_rotate(struct llama_kvmem * km, int32_t layer, int32_t n_head, const int32_t * pos, int32_t n, const float * src, float * dst);

#ifdef __cplusplus
}

struct llama_cparams;
class llm_graph_result;

// Called first in every KV attention of the graph builder.
void llama_kvmem_on_attn(
        const llama_cparams & cparams,
        llm_graph_result    * res,
        ggml_context        * ctx0,
        ggml_cgraph         * gf,
        ggml_tensor         * q_cur,
        ggml_tensor         * k_cur,
        float                 kq_scale,
        int                   il,
        bool                  k_rotated);
#endif
