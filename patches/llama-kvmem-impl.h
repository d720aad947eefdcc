// State behind the hooks; shared by llama-kvmem.cpp (attach, capture) and llama-kvmem-cells.cpp (cells, rebuild).
#pragma once

#include "llama-kvmem.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <stdexcept>
#include <string>
#include <vector>

class llama_kv_cache;
struct llama_model;

struct kvmem_failure : std::runtime_error {
    int32_t code;
    kvmem_failure(int32_t code, const std::string & text) : std::runtime_error(text), code(code) {}
};

struct kvmem_layer_state {
    kvmem_layer_info info = {};

    ggml_tensor * cache_k = nullptr; // [n_embd_k_gqa, n_cells]
    ggml_tensor * cache_v = nullptr; // [n_embd_v_gqa, n_cells]
    ggml_tensor * cap_k   = nullptr; // [n_embd_k_gqa, n_rows] raw_k_type
    ggml_tensor * cap_q   = nullptr; // [n_head*d_k, n_rows] F32, full-attention layers only
    ggml_tensor * factors = nullptr; // frequency factors of the ROPE node: a weight

    std::string reason;
};

struct llama_kvmem {
    llama_context     * ctx = nullptr;
    const llama_model * model = nullptr;
    kvmem_params        params = {};

    llama_kv_cache * caches[2] = { nullptr, nullptr };

    std::vector<kvmem_layer_state> layers;
    std::vector<int32_t>           layer_of_il; // -1: the layer owns no KV

    int64_t record_bytes = 0;

    // rows of the last batch
    std::vector<int32_t> row_seq;
    std::vector<int32_t> row_pos;
    bool row_overflow = false;

    std::vector<ggml_context_ptr>        cap_ctxs;
    std::vector<ggml_backend_buffer_ptr> cap_bufs;

    ggml_backend_sched_ptr sched; // own scheduler on the context's backends: the decode graph stays untouched

    std::string last_error;

    void attach(llama_context * ctx, kvmem_params params);
    void find_memory();
    void add_layers();
    void alloc_capture();
    void probe_graph();

    void graph_capture(uint32_t flags, llm_graph_result * res, ggml_context * ctx0, ggml_cgraph * gf,
            ggml_tensor * q_cur, ggml_tensor * k_cur, float kq_scale, int il, bool k_rotated);
    void describe(kvmem_layer_state & layer, ggml_tensor * q_cur, ggml_tensor * k_cur, float kq_scale, bool k_rotated);

    const kvmem_layer_state & layer_at(int32_t i) const;
    void check_rows (const int32_t * rows,  int32_t n) const;
    void check_cells(const int32_t * cells, int32_t n) const;
    int32_t n_cells() const;

    // metadata of both caches
    void meta_set(int32_t seq, int32_t cell, int32_t pos, llama_token token);
    void meta_clear(int32_t cell);
    bool cell_empty(int32_t cell) const;
    int32_t cell_pos(int32_t cell) const;
    int32_t cell_seq(int32_t cell) const;
    llama_token cell_token(int32_t cell) const;
    void meta_export(int32_t * pos, int32_t * seq) const;
    void set_place(const int32_t * cells, int32_t n);

    // graphs on the own scheduler
    ggml_tensor * build_k_rot(const kvmem_layer_state & layer, ggml_context * g) const;
    void          fill_k_rot(const kvmem_layer_state & layer, ggml_tensor * t) const;
    void move_cells(int32_t seq, const int32_t * cells, const int32_t * pos, int32_t n);
    void write_blocks(int32_t seq, const kvmem_block_write * blocks, int32_t n_blocks);
    void read_raw_k(int32_t i_layer, const int32_t * cells, int32_t n, float * dst);
    void rotate(int32_t i_layer, int32_t n_head, const int32_t * pos, int32_t n, const float * src, float * dst);

    template <typename F> int32_t guard(F && f) {
        try {
            return f();
        } catch (const kvmem_failure & e) {
            last_error = e.what();
            return e.code;
        } catch (const std::exception & e) {
            last_error = e.what();
            return KVMEM_E_INTERNAL;
        }
    }
};
