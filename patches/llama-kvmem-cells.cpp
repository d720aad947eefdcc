#include "llama-kvmem-impl.h"

#include "llama-context.h"
#include "llama-kv-cache.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace {

constexpr int64_t STAGING_BYTES = 16 << 20; // raw K staged per graph of write_blocks

// calls f(i0, n) for runs of consecutive numbers
template <typename F> void for_runs(const int32_t * v, int32_t n, F && f) {
    for (int32_t i0 = 0; i0 < n;) {
        int32_t n_run = 1;
        while (i0 + n_run < n && v[i0 + n_run] == v[i0] + n_run) {
            ++n_run;
        }
        f(i0, n_run);
        i0 += n_run;
    }
}

void get_rows_of(const ggml_tensor * t, size_t row_bytes, const int32_t * rows, int32_t n, uint8_t * dst) {
    for_runs(rows, n, [&](int32_t i0, int32_t n_run) {
        ggml_backend_tensor_get(t, dst + i0*row_bytes, rows[i0]*row_bytes, n_run*row_bytes);
    });
}

int32_t positions_per_token(const kvmem_layer_info & info) {
    return (info.rope[2] & GGML_ROPE_TYPE_MROPE) ? 4 : 1;
}

// For text an M-RoPE token sits at (p, p, p, 0), as llama.cpp fills it.
void fill_positions(ggml_tensor * t, const int32_t * pos, int32_t n, int32_t per_token) {
    std::vector<int32_t> all((size_t) n*per_token, 0);
    for (int32_t s = 0; s < std::min(per_token, 3); ++s) {
        std::copy(pos, pos + n, all.begin() + (size_t) s*n);
    }
    ggml_backend_tensor_set(t, all.data(), 0, all.size()*sizeof(int32_t));
}

float op_float(const int32_t * op_params, int i) {
    float f;
    memcpy(&f, op_params + i, sizeof(f));
    return f;
}

void set_op_float(int32_t * op_params, int i, float f) { memcpy(op_params + i, &f, sizeof(f)); }

// YaRN scales by attn_factor*(1 + 0.1 ln(1/freq_scale)) inside RoPE. A rotation of rows that carry this factor already must not apply
// it again (power 0); undoing the rotation must divide it out (power -1).
void set_magnitude(int32_t * op_params, int power) {
    const float ext = op_float(op_params, 7);
    const float own = ext != 0.0f ? 1.0f + 0.1f*logf(1.0f/op_float(op_params, 6)) : 1.0f;
    const float all = own*op_float(op_params, 8);
    set_op_float(op_params, 8, (power == 0 ? 1.0f : 1.0f/all)/own);
}

// The captured ROPE node over other rows: same op, same parameters, same frequency factors.
ggml_tensor * clone_rope(ggml_context * g, const kvmem_layer_state & layer, ggml_tensor * x, ggml_tensor * pos, ggml_op op, const int32_t * op_params) {
    ggml_tensor * r = ggml_dup_tensor(g, x);
    r->op     = op;
    r->src[0] = x;
    r->src[1] = pos;
    r->src[2] = layer.factors;
    memcpy(r->op_params, op_params, sizeof(layer.info.rope));
    return r;
}

struct small_graph {
    ggml_context_ptr ctx { ggml_init({ 2048*ggml_tensor_overhead() + ggml_graph_overhead_custom(2048, false), nullptr, true }) };
    ggml_cgraph    * gf = ggml_new_graph_custom(ctx.get(), 2048, false);

    ggml_tensor * input(ggml_type type, int64_t ne0, int64_t ne1) {
        ggml_tensor * t = ggml_new_tensor_2d(ctx.get(), type, ne0, ne1);
        ggml_set_input(t);
        return t;
    }

    void alloc(ggml_backend_sched_t sched) {
        ggml_backend_sched_reset(sched);
        if (!ggml_backend_sched_alloc_graph(sched, gf)) {
            throw kvmem_failure(KVMEM_E_COMPUTE, "no memory for the rebuild graph");
        }
    }

    void run(ggml_backend_sched_t sched) {
        if (ggml_backend_sched_graph_compute(sched, gf) != GGML_STATUS_SUCCESS) {
            throw kvmem_failure(KVMEM_E_COMPUTE, "the backend failed in the rebuild graph");
        }
    }
};

} // namespace

//
// metadata
//

int32_t llama_kvmem::n_cells() const { return (int32_t) caches[0]->get_size(); }

const kvmem_layer_state & llama_kvmem::layer_at(int32_t i) const {
    if (i < 0 || i >= (int32_t) layers.size()) {
        throw kvmem_failure(KVMEM_E_ARGUMENT, "no layer " + std::to_string(i));
    }
    return layers[i];
}

void llama_kvmem::check_rows(const int32_t * rows, int32_t n) const {
    for (int32_t i = 0; i < n; ++i) {
        if (rows[i] < 0 || rows[i] >= std::min<int32_t>(params.n_rows, (int32_t) row_pos.size())) {
            throw kvmem_failure(KVMEM_E_ARGUMENT, "row " + std::to_string(rows[i]) + " was not captured by the last batch");
        }
    }
}

void llama_kvmem::check_cells(const int32_t * cells, int32_t n) const {
    for (int32_t i = 0; i < n; ++i) {
        if (cells[i] < 0 || cells[i] >= n_cells()) {
            throw kvmem_failure(KVMEM_E_ARGUMENT, "cell " + std::to_string(cells[i]) + " of " + std::to_string(n_cells()) + " does not exist");
        }
    }
}

bool    llama_kvmem::cell_empty(int32_t cell) const { return caches[0]->v_cells[0].is_empty(cell); }
int32_t llama_kvmem::cell_pos  (int32_t cell) const { return cell_empty(cell) ? -1 : caches[0]->v_cells[0].pos_get(cell); }
int32_t llama_kvmem::cell_seq  (int32_t cell) const { return cell_empty(cell) ? -1 : caches[0]->v_cells[0].seq_get(cell); }

llama_token llama_kvmem::cell_token(int32_t cell) const { return caches[0]->v_cells[0].ext_get(cell).tok; }

void llama_kvmem::meta_set(int32_t seq, int32_t cell, int32_t pos, llama_token token) {
    for (auto * kv : caches) {
        if (!kv) {
            continue;
        }
        auto & cells = kv->v_cells[0];
        if (!cells.is_empty(cell)) {
            cells.rm(cell);
        }
        cells.pos_set(cell, pos);
        llama_kv_cell_ext ext;
        ext.x = ext.y = pos;
        ext.tok = token;
        cells.ext_set(cell, ext);
        cells.seq_add(cell, seq);
    }
}

void llama_kvmem::meta_clear(int32_t cell) {
    for (auto * kv : caches) {
        if (kv && !kv->v_cells[0].is_empty(cell)) {
            kv->v_cells[0].rm(cell);
        }
    }
}

void llama_kvmem::meta_export(int32_t * pos, int32_t * seq) const {
    for (int32_t i = 0; i < n_cells(); ++i) {
        pos[i] = cell_pos(i);
        seq[i] = cell_seq(i);
    }
}

void llama_kvmem::set_place(const int32_t * cells, int32_t n) {
    for (auto * kv : caches) {
        if (kv) {
            kv->kvmem_place.assign(cells, cells + n);
        }
    }
    llama_get_memory(ctx)->pos_holes = n > 0; // a view at original positions may end before the next token
}

//
// graphs
//

ggml_tensor * llama_kvmem::build_k_rot(const kvmem_layer_state & layer, ggml_context * g) const {
    // asked of the graph that was captured, not of the cache: some builders leave a rotation out that the cache announces
    return layer.info.k_rotated ? caches[layer.info.cache]->build_input_k_rot(g) : nullptr;
}

void llama_kvmem::fill_k_rot(const kvmem_layer_state & layer, ggml_tensor * t) const {
    if (t) {
        const auto & table = caches[layer.info.cache]->attn_rot_hadamard.at(t->ne[0]);
        ggml_backend_tensor_set(t, table.data(), 0, ggml_nbytes(t));
    }
}

void llama_kvmem::write_blocks(int32_t seq, const kvmem_block_write * blocks, int32_t n_blocks) {
    std::vector<int32_t> cells, pos, tokens;
    for (int32_t b = 0; b < n_blocks; ++b) {
        const auto & w = blocks[b];
        if (!w.record || !w.cells || !w.tokens || w.n < 0 || w.slot0 < 0 || w.slot0 + w.n > params.block_size || w.pos0 < 0) {
            throw kvmem_failure(KVMEM_E_ARGUMENT, "block " + std::to_string(b) + " lies outside its record");
        }
        check_cells(w.cells, w.n);
        for (int32_t i = 0; i < w.n; ++i) {
            cells.push_back(w.cells[i]);
            pos.push_back(w.pos0 + i);
            tokens.push_back(w.tokens[i]);
        }
    }
    const int64_t n = (int64_t) cells.size();
    if (n == 0) {
        return;
    }
    for (int32_t cell : cells) {
        if (!cell_empty(cell)) {
            throw kvmem_failure(KVMEM_E_STATE, "cell " + std::to_string(cell) + " is occupied");
        }
    }
    // the rows of one layer, gathered from all records
    const auto gather = [&](int64_t offset, int64_t row, uint8_t * dst) {
        for (int32_t b = 0; b < n_blocks; ++b) {
            const auto & w = blocks[b];
            memcpy(dst, w.record + offset + w.slot0*row, w.n*row);
            dst += w.n*row;
        }
    };

    size_t i_layer = 0;
    std::vector<uint8_t> staging;
    while (i_layer < layers.size()) {
        small_graph g;
        struct part { const kvmem_layer_state * layer; ggml_tensor * raw, * pos, * rot; };
        std::vector<part> parts;
        ggml_tensor * idx = g.input(GGML_TYPE_I64, n, 1);
        int64_t n_staged = 0;
        for (; i_layer < layers.size() && parts.size() < 64 && (parts.empty() || n_staged < STAGING_BYTES); ++i_layer) {
            const auto & layer = layers[i_layer];
            const auto & info  = layer.info;
            part p = { &layer, g.input((ggml_type) params.raw_k_type, (int64_t) info.d_k*info.n_head_kv, n), nullptr, nullptr };
            ggml_tensor * cur = p.raw;
            if (cur->type != GGML_TYPE_F32) {
                cur = ggml_cast(g.ctx.get(), cur, GGML_TYPE_F32);
            }
            cur = ggml_reshape_3d(g.ctx.get(), cur, info.d_k, info.n_head_kv, n);
            if (info.status == KVMEM_LAYER_ROPE) {
                p.pos = g.input(GGML_TYPE_I32, n*positions_per_token(info), 1);
                cur = clone_rope(g.ctx.get(), layer, cur, p.pos, GGML_OP_ROPE, info.rope);
            }
            p.rot = build_k_rot(layer, g.ctx.get());
            if (p.rot) {
                cur = llama_mul_mat_hadamard(g.ctx.get(), cur, p.rot);
            }
            cur = ggml_reshape_2d(g.ctx.get(), cur, (int64_t) info.d_k*info.n_head_kv, n);
            ggml_build_forward_expand(g.gf, ggml_set_rows(g.ctx.get(), layer.cache_k, cur, idx));
            n_staged += n*info.raw_k_row;
            parts.push_back(p);
        }
        g.alloc(sched.get());
        std::vector<int64_t> idx64(cells.begin(), cells.end());
        ggml_backend_tensor_set(idx, idx64.data(), 0, ggml_nbytes(idx));
        for (auto & p : parts) {
            staging.resize(n*p.layer->info.raw_k_row);
            gather(p.layer->info.k_offset, p.layer->info.raw_k_row, staging.data());
            ggml_backend_tensor_set(p.raw, staging.data(), 0, staging.size());
            if (p.pos) {
                fill_positions(p.pos, pos.data(), (int32_t) n, positions_per_token(p.layer->info));
            }
            fill_k_rot(*p.layer, p.rot);
        }
        g.run(sched.get());
    }
    for (const auto & layer : layers) {
        const int64_t row = layer.info.v_row;
        staging.resize(n*row);
        gather(layer.info.v_offset, row, staging.data());
        for_runs(cells.data(), (int32_t) n, [&](int32_t i0, int32_t n_run) {
            ggml_backend_tensor_set(layer.cache_v, staging.data() + i0*row, cells[i0]*row, n_run*row);
        });
    }
    for (int64_t i = 0; i < n; ++i) { // last: a failure above leaves the cells empty
        meta_set(seq, cells[i], pos[i], tokens[i]);
    }
}

void llama_kvmem::move_cells(int32_t seq, const int32_t * cells, const int32_t * pos, int32_t n) {
    check_cells(cells, n);
    std::vector<int32_t> delta(n);
    std::vector<llama_token> tokens(n);
    for (int32_t i = 0; i < n; ++i) {
        if (cell_empty(cells[i]) || cell_seq(cells[i]) != seq || pos[i] < 0) {
            throw kvmem_failure(KVMEM_E_STATE, "cell " + std::to_string(cells[i]) + " does not belong to sequence " + std::to_string(seq));
        }
        delta[i]  = pos[i] - cell_pos(cells[i]);
        tokens[i] = cell_token(cells[i]);
    }
    if (n == 0) {
        return;
    }
    small_graph g;
    struct part { const kvmem_layer_state * layer; ggml_tensor * pos, * rot; };
    std::vector<part> parts;
    ggml_tensor * idx32 = g.input(GGML_TYPE_I32, n, 1);
    ggml_tensor * idx64 = g.input(GGML_TYPE_I64, n, 1);
    for (const auto & layer : layers) {
        const auto & info = layer.info;
        if (info.status != KVMEM_LAYER_ROPE) {
            continue;
        }
        int32_t op_params[16];
        memcpy(op_params, info.rope, sizeof(op_params));
        set_magnitude(op_params, 0);

        part p = { &layer, g.input(GGML_TYPE_I32, (int64_t) n*positions_per_token(info), 1), build_k_rot(layer, g.ctx.get()) };
        ggml_tensor * cur = ggml_get_rows(g.ctx.get(), layer.cache_k, idx32); // F32
        cur = ggml_reshape_3d(g.ctx.get(), cur, info.d_k, info.n_head_kv, n);
        if (p.rot) {
            cur = llama_mul_mat_hadamard(g.ctx.get(), cur, p.rot); // its own inverse
        }
        cur = clone_rope(g.ctx.get(), layer, cur, p.pos, GGML_OP_ROPE, op_params);
        if (p.rot) {
            cur = llama_mul_mat_hadamard(g.ctx.get(), cur, p.rot);
        }
        cur = ggml_reshape_2d(g.ctx.get(), cur, (int64_t) info.d_k*info.n_head_kv, n);
        ggml_build_forward_expand(g.gf, ggml_set_rows(g.ctx.get(), layer.cache_k, cur, idx64));
        parts.push_back(p);
    }
    if (!parts.empty()) {
        g.alloc(sched.get());
        std::vector<int64_t> wide(cells, cells + n);
        ggml_backend_tensor_set(idx32, cells, 0, ggml_nbytes(idx32));
        ggml_backend_tensor_set(idx64, wide.data(), 0, ggml_nbytes(idx64));
        for (auto & p : parts) {
            fill_positions(p.pos, delta.data(), n, positions_per_token(p.layer->info));
            fill_k_rot(*p.layer, p.rot);
        }
        g.run(sched.get());
    }
    for (int32_t i = 0; i < n; ++i) {
        meta_set(seq, cells[i], pos[i], tokens[i]);
    }
}

void llama_kvmem::read_raw_k(int32_t i_layer, const int32_t * cells, int32_t n, float * dst) {
    const auto & layer = layer_at(i_layer);
    const auto & info  = layer.info;
    check_cells(cells, n);
    if (n == 0) {
        return;
    }
    std::vector<int32_t> pos(n);
    for (int32_t i = 0; i < n; ++i) {
        if (cell_empty(cells[i])) {
            throw kvmem_failure(KVMEM_E_STATE, "cell " + std::to_string(cells[i]) + " is empty");
        }
        pos[i] = cell_pos(cells[i]);
    }
    small_graph g;
    ggml_tensor * idx = g.input(GGML_TYPE_I32, n, 1);
    ggml_tensor * p   = info.status == KVMEM_LAYER_ROPE ? g.input(GGML_TYPE_I32, (int64_t) n*positions_per_token(info), 1) : nullptr;
    ggml_tensor * rot = build_k_rot(layer, g.ctx.get());
    ggml_tensor * cur = ggml_get_rows(g.ctx.get(), layer.cache_k, idx);
    cur = ggml_reshape_3d(g.ctx.get(), cur, info.d_k, info.n_head_kv, n);
    if (rot) {
        cur = llama_mul_mat_hadamard(g.ctx.get(), cur, rot);
    }
    if (p) {
        int32_t op_params[16];
        memcpy(op_params, info.rope, sizeof(op_params));
        set_magnitude(op_params, -1);
        cur = clone_rope(g.ctx.get(), layer, cur, p, GGML_OP_ROPE_BACK, op_params);
    }
    ggml_set_output(cur);
    ggml_build_forward_expand(g.gf, cur);
    g.alloc(sched.get());
    ggml_backend_tensor_set(idx, cells, 0, ggml_nbytes(idx));
    if (p) {
        fill_positions(p, pos.data(), n, positions_per_token(info));
    }
    fill_k_rot(layer, rot);
    g.run(sched.get());
    ggml_backend_tensor_get(cur, dst, 0, ggml_nbytes(cur));
}

void llama_kvmem::rotate(int32_t i_layer, int32_t n_head, const int32_t * pos, int32_t n, const float * src, float * dst) {
    const auto & layer = layer_at(i_layer);
    const auto & info  = layer.info;
    if (info.status != KVMEM_LAYER_ROPE || n_head < 1 || n < 1) {
        throw kvmem_failure(KVMEM_E_ARGUMENT, "the layer is not rotated or there are no rows");
    }
    small_graph g;
    ggml_tensor * x   = g.input(GGML_TYPE_F32, (int64_t) info.d_k*n_head, n);
    ggml_tensor * p   = g.input(GGML_TYPE_I32, (int64_t) n*positions_per_token(info), 1);
    ggml_tensor * cur = clone_rope(g.ctx.get(), layer, ggml_reshape_3d(g.ctx.get(), x, info.d_k, n_head, n), p, GGML_OP_ROPE, info.rope);
    ggml_set_output(cur);
    ggml_build_forward_expand(g.gf, cur);
    g.alloc(sched.get());
    ggml_backend_tensor_set(x, src, 0, ggml_nbytes(x));
    fill_positions(p, pos, n, positions_per_token(info));
    g.run(sched.get());
    ggml_backend_tensor_get(cur, dst, 0, ggml_nbytes(cur));
}

//
// C API
//

int32_t kvmem_read_q(llama_kvmem * km, int32_t i_layer, const int32_t * rows, int32_t n, float * dst) {
    return km->guard([&]() -> int32_t {
        const auto & layer = km->layer_at(i_layer);
        if (!layer.cap_q) {
            throw kvmem_failure(KVMEM_E_ARGUMENT, "Q is kept for full-attention layers only");
        }
        km->check_rows(rows, n);
        get_rows_of(layer.cap_q, layer.cap_q->nb[1], rows, n, (uint8_t *) dst);
        return n;
    });
}

int32_t kvmem_read_k(llama_kvmem * km, int32_t i_layer, const int32_t * rows, int32_t n, void * dst) {
    return km->guard([&]() -> int32_t {
        const auto & layer = km->layer_at(i_layer);
        km->check_rows(rows, n);
        get_rows_of(layer.cap_k, layer.cap_k->nb[1], rows, n, (uint8_t *) dst);
        return n;
    });
}

int32_t kvmem_stage_out(llama_kvmem * km, uint8_t * record, int32_t slot0, const int32_t * rows, const int32_t * cells, int32_t n) {
    return km->guard([&]() -> int32_t {
        if (!record || slot0 < 0 || n < 0 || slot0 + n > km->params.block_size) {
            throw kvmem_failure(KVMEM_E_ARGUMENT, "the tokens do not fit the record");
        }
        km->check_rows(rows, n);
        km->check_cells(cells, n);
        for (const auto & layer : km->layers) {
            const auto & info = layer.info;
            get_rows_of(layer.cap_k,   info.raw_k_row, rows,  n, record + info.k_offset + slot0*info.raw_k_row);
            get_rows_of(layer.cache_v, info.v_row,     cells, n, record + info.v_offset + slot0*info.v_row);
        }
        return n;
    });
}

int32_t kvmem_place(llama_kvmem * km, const int32_t * cells, int32_t n) {
    return km->guard([&]() -> int32_t {
        km->check_cells(cells, n);
        for (int32_t i = 0; i < n; ++i) {
            if (!km->cell_empty(cells[i])) {
                throw kvmem_failure(KVMEM_E_STATE, "cell " + std::to_string(cells[i]) + " is occupied");
            }
        }
        km->set_place(cells, n);
        return n;
    });
}

int32_t kvmem_cells(llama_kvmem * km, int32_t * pos, int32_t * seq, int32_t n_max) {
    return km->guard([&]() -> int32_t {
        if (n_max < km->n_cells()) {
            throw kvmem_failure(KVMEM_E_ARGUMENT, "the arrays are smaller than the cells");
        }
        km->meta_export(pos, seq);
        return km->n_cells();
    });
}

int32_t kvmem_free_cells(llama_kvmem * km, const int32_t * cells, int32_t n) {
    return km->guard([&]() -> int32_t {
        km->check_cells(cells, n);
        for (int32_t i = 0; i < n; ++i) {
            km->meta_clear(cells[i]);
        }
        return n;
    });
}

int32_t kvmem_show_cells(llama_kvmem * km, int32_t seq, const int32_t * cells, const int32_t * pos, const int32_t * tokens, int32_t n) {
    return km->guard([&]() -> int32_t {
        km->check_cells(cells, n);
        for (int32_t i = 0; i < n; ++i) {
            if (!km->cell_empty(cells[i]) || pos[i] < 0) {
                throw kvmem_failure(KVMEM_E_STATE, "cell " + std::to_string(cells[i]) + " is occupied or its position negative");
            }
        }
        for (int32_t i = 0; i < n; ++i) {
            km->meta_set(seq, cells[i], pos[i], tokens[i]);
        }
        return n;
    });
}

int32_t kvmem_move_cells(llama_kvmem * km, int32_t seq, const int32_t * cells, const int32_t * pos, int32_t n) {
    return km->guard([&]() -> int32_t { km->move_cells(seq, cells, pos, n); return n; });
}

int32_t kvmem_write_blocks(llama_kvmem * km, int32_t seq, const kvmem_block_write * blocks, int32_t n_blocks) {
    return km->guard([&]() -> int32_t { km->write_blocks(seq, blocks, n_blocks); return n_blocks; });
}

int32_t kvmem_read_rows(llama_kvmem * km, int32_t i_layer, int32_t is_v, const int32_t * cells, int32_t n, void * dst) {
    return km->guard([&]() -> int32_t {
        const auto & layer = km->layer_at(i_layer);
        km->check_cells(cells, n);
        auto * t = is_v ? layer.cache_v : layer.cache_k;
        get_rows_of(t, t->nb[1], cells, n, (uint8_t *) dst);
        return n;
    });
}

int32_t kvmem_read_raw_k(llama_kvmem * km, int32_t i_layer, const int32_t * cells, int32_t n, float * dst) {
    return km->guard([&]() -> int32_t { km->read_raw_k(i_layer, cells, n, dst); return n; });
}

int32_t kvmem_rotate(llama_kvmem * km, int32_t i_layer, int32_t n_head, const int32_t * pos, int32_t n, const float * src, float * dst) {
    return km->guard([&]() -> int32_t { km->rotate(i_layer, n_head, pos, n, src, dst); return n; });
}
