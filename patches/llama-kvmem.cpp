#include "llama-kvmem-impl.h"

#include "llama-context.h"
#include "llama-graph.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-model.h"

#include <cmath>
#include <cstring>
#include <map>

#ifndef KVMEM_PATCH_ID
#define KVMEM_PATCH_ID "unknown"
#endif

//
// capture
//

// Row numbers of the ubatch in the capture tensors; filled when the graph runs, so ubatches of one batch append.
class llm_graph_input_kvmem : public llm_graph_input_i {
public:
    llm_graph_input_kvmem(llama_kvmem * km, ggml_context * ctx0, int64_t n_tokens) : km(km), seen(km->layers.size(), false) {
        rows = ggml_new_tensor_1d(ctx0, GGML_TYPE_I64, n_tokens);
        ggml_set_input(rows);
        ggml_set_name(rows, "kvmem_rows");
    }

    void set_input(const llama_ubatch * ubatch) override {
        if (!ubatch || !rows->buffer) {
            return;
        }
        const int64_t n_rows = km->params.n_rows;
        std::vector<int64_t> idx(ubatch->n_tokens);
        for (uint32_t i = 0; i < ubatch->n_tokens; ++i) {
            const int64_t row = (int64_t) km->row_pos.size();
            km->row_overflow |= row >= n_rows;
            idx[i] = row % n_rows;
            km->row_pos.push_back(ubatch->pos[i]);
            km->row_seq.push_back(ubatch->seq_id[i][0]);
        }
        ggml_backend_tensor_set(rows, idx.data(), 0, ggml_nbytes(rows));
    }

    bool can_reuse(const llm_graph_params & params) override {
        return params.cparams.kvmem == km && rows->ne[0] == (int64_t) params.ubatch.n_tokens;
    }

    llama_kvmem * km;
    ggml_tensor * rows;
    std::vector<bool> seen; // per captured layer, within this graph
};

namespace {

struct rope_walk {
    ggml_tensor * raw  = nullptr; // what goes into the rotation
    ggml_tensor * rope = nullptr; // nullptr: no rotation
    float scale = 1.0f;           // multiplied after the rotation
    bool  temperature = false;    // per-token factor after the rotation
    const char * bad = nullptr;
};

// Fail closed: a rotation anywhere behind an op we do not understand means that the raw rows are not what we hold.
bool rope_below(const ggml_tensor * t, int depth) {
    if (!t || depth > 16) {
        return t != nullptr;
    }
    switch (t->op) {
        case GGML_OP_NONE: case GGML_OP_MUL_MAT: case GGML_OP_MUL_MAT_ID: case GGML_OP_GET_ROWS: return false;
        case GGML_OP_ROPE: return true;
        default: break;
    }
    for (int i = 0; i < GGML_MAX_SRC; ++i) {
        if (t->src[i] && rope_below(t->src[i], depth + 1)) {
            return true;
        }
    }
    return false;
}

rope_walk walk_to_rope(ggml_tensor * start) {
    rope_walk w;
    for (ggml_tensor * t = start; t;) {
        if (t->op == GGML_OP_ROPE) {
            w.raw  = t->src[0];
            w.rope = t;
            if (w.raw->op == GGML_OP_ROPE || rope_below(w.raw, 0)) {
                w.bad = "the rotation is applied twice";
            } else if (t->src[2] && t->src[2]->op != GGML_OP_NONE) {
                w.bad = "the rotation's frequency factors are computed in the graph";
            }
            return w;
        }
        if (t->op == GGML_OP_SCALE) {
            float s[2];
            memcpy(s, t->op_params, sizeof(s));
            if (s[1] == 0.0f) {
                w.scale *= s[0];
                t = t->src[0];
                continue;
            }
        }
        if (t->op == GGML_OP_MUL && t->src[1]->ne[0] == 1) {
            w.temperature = true;
            t = t->src[0];
            continue;
        }
        if (t->op == GGML_OP_RESHAPE || t->op == GGML_OP_CONT ||
                (t->op == GGML_OP_VIEW && ggml_nelements(t) == ggml_nelements(t->src[0]))) {
            t = t->src[0];
            continue;
        }
        if (rope_below(t, 0)) {
            w.bad = "an operation after the rotation does not commute with it";
            return w;
        }
        break;
    }
    w = {};
    w.raw = start;
    return w;
}

// [d, n_head, n_tokens] -> [d*n_head, n_tokens] as F32
ggml_tensor * rows_2d(ggml_context * ctx0, ggml_tensor * t) {
    if (t->type != GGML_TYPE_F32) {
        t = ggml_cast(ctx0, t, GGML_TYPE_F32);
    }
    const int64_t n_row  = t->ne[0]*t->ne[1];
    const int64_t n_rows = t->ne[2]*t->ne[3];
    if (t->ne[3] == 1 && t->nb[0] == ggml_type_size(t->type) && t->nb[1] == t->ne[0]*t->nb[0]) {
        return ggml_view_2d(ctx0, t, n_row, n_rows, t->nb[2], 0);
    }
    return ggml_reshape_2d(ctx0, ggml_cont(ctx0, t), n_row, n_rows);
}

llm_graph_input_kvmem * rows_input(llama_kvmem * km, llm_graph_result * res, ggml_context * ctx0, int64_t n_tokens) {
    for (auto & input : res->inputs) {
        if (auto * found = dynamic_cast<llm_graph_input_kvmem *>(input.get())) {
            return found;
        }
    }
    auto input = std::make_unique<llm_graph_input_kvmem>(km, ctx0, n_tokens);
    return (llm_graph_input_kvmem *) res->add_input(std::move(input));
}

} // namespace

void llama_kvmem_on_attn(const llama_cparams & cparams, llm_graph_result * res, ggml_context * ctx0, ggml_cgraph * gf,
        ggml_tensor * q_cur, ggml_tensor * k_cur, float kq_scale, int il, bool k_rotated) {
    if (cparams.kvmem && cparams.kvmem_flags && q_cur && k_cur) {
        cparams.kvmem->graph_capture(cparams.kvmem_flags, res, ctx0, gf, q_cur, k_cur, kq_scale, il, k_rotated);
    }
}

void llama_kvmem::describe(kvmem_layer_state & layer, ggml_tensor * q_cur, ggml_tensor * k_cur, float kq_scale, bool k_rotated) {
    auto & info = layer.info;
    const rope_walk q = walk_to_rope(q_cur);
    const rope_walk k = walk_to_rope(k_cur);

    const auto refuse = [&](const char * why) {
        info.status  = KVMEM_LAYER_UNSUPPORTED;
        layer.reason = why;
    };
    if (q.bad || k.bad) {
        return refuse(q.bad ? q.bad : k.bad);
    }
    if (k.scale != 1.0f || k.temperature) {
        return refuse("K is scaled after the rotation");
    }
    if ((q.rope == nullptr) != (k.rope == nullptr)) {
        return refuse("only one of Q and K is rotated");
    }
    if (k.raw->ne[0]*k.raw->ne[1] != (int64_t) info.n_head_kv*info.d_k || q.raw->ne[0]*q.raw->ne[1] != (int64_t) info.n_head*info.d_k) {
        return refuse("Q or K has an unexpected shape");
    }
    info.k_rotated     = k_rotated;
    info.q_temperature = q.temperature;
    info.scale         = kq_scale*q.scale;
    info.status        = k.rope ? KVMEM_LAYER_ROPE : KVMEM_LAYER_NOPE;
    if (k.rope) {
        if (memcmp(q.rope->op_params, k.rope->op_params, sizeof(info.rope)) != 0 || q.rope->src[2] != k.rope->src[2]) {
            return refuse("Q and K are rotated differently");
        }
        memcpy(info.rope, k.rope->op_params, sizeof(info.rope));
        layer.factors     = k.rope->src[2];
        info.rope_factors = layer.factors != nullptr;
    }
}

void llama_kvmem::graph_capture(uint32_t flags, llm_graph_result * res, ggml_context * ctx0, ggml_cgraph * gf,
        ggml_tensor * q_cur, ggml_tensor * k_cur, float kq_scale, int il, bool k_rotated) {
    const int32_t i_layer = il < (int) layer_of_il.size() ? layer_of_il[il] : -1;
    if (i_layer < 0) {
        return;
    }
    auto & layer = layers[i_layer];
    auto * input = rows_input(this, res, ctx0, k_cur->ne[2]*k_cur->ne[3]);

    if (input->seen[i_layer]) {
        layer.info.status = KVMEM_LAYER_UNSUPPORTED;
        layer.reason      = "the layer is evaluated more than once per token";
    }
    input->seen[i_layer] = true;
    if (layer.info.status == KVMEM_LAYER_UNSEEN) {
        describe(layer, q_cur, k_cur, kq_scale, k_rotated);
    }
    if (layer.info.status == KVMEM_LAYER_UNSUPPORTED) {
        return;
    }
    // Before q_cur and k_cur are expanded: the raw tensors are still intact then and no extra buffer is needed.
    if (flags & KVMEM_CAPTURE_K) {
        ggml_build_forward_expand(gf, ggml_set_rows(ctx0, layer.cap_k, rows_2d(ctx0, walk_to_rope(k_cur).raw), input->rows));
    }
    if ((flags & KVMEM_CAPTURE_Q) && layer.cap_q) {
        ggml_build_forward_expand(gf, ggml_set_rows(ctx0, layer.cap_q, rows_2d(ctx0, walk_to_rope(q_cur).raw), input->rows));
    }
}

//
// attach
//

void llama_kvmem::find_memory() {
    llama_memory_t mem = llama_get_memory(ctx);
    if (!mem) {
        throw kvmem_failure(KVMEM_E_UNSUPPORTED, "the model keeps no KV cache");
    }
    if (auto * kv = dynamic_cast<llama_kv_cache *>(mem)) {
        caches[0] = kv;
    } else if (auto * iswa = dynamic_cast<llama_kv_cache_iswa *>(mem)) {
        caches[0] = iswa->get_base();
        caches[1] = iswa->get_swa();
    } else if (dynamic_cast<llama_memory_hybrid *>(mem) || dynamic_cast<llama_memory_hybrid_iswa *>(mem)) {
        // the state cannot go back to an earlier token, nor skip one, so it would tell of another history than the cells
        throw kvmem_failure(KVMEM_E_UNSUPPORTED, "some layers keep a recurrent state, which cannot follow the blocks");
    } else {
        throw kvmem_failure(KVMEM_E_UNSUPPORTED, "the model keeps its attention state in a form without K rows per token");
    }
    for (auto * kv : caches) {
        if (!kv) {
            continue;
        }
        if (kv->v_trans) {
            throw kvmem_failure(KVMEM_E_UNSUPPORTED, "V is stored transposed; turn flash attention on");
        }
        if (kv->n_stream != 1) {
            throw kvmem_failure(KVMEM_E_UNSUPPORTED, "the cache has one stream per sequence; use kv_unified");
        }
        if (kv->other) {
            throw kvmem_failure(KVMEM_E_UNSUPPORTED, "the cache is shared with another context");
        }
        if (kv->get_size() != caches[0]->get_size()) {
            throw kvmem_failure(KVMEM_E_UNSUPPORTED, "the sliding-window cache is smaller than the full one; use swa_full");
        }
    }
    if (model->pos_embd) {
        throw kvmem_failure(KVMEM_E_UNSUPPORTED, "positions are learned and added to the token embedding, so blocks cannot be moved");
    }
}

void llama_kvmem::add_layers() {
    const auto & hparams = model->hparams;
    layer_of_il.assign(hparams.n_layer_all, -1);

    std::map<uint32_t, std::pair<llama_kv_cache::kv_layer *, int>> by_il;
    for (int c = 0; c < 2; ++c) {
        if (caches[c]) {
            for (auto & kv_layer : caches[c]->layers) {
                by_il[kv_layer.il] = { &kv_layer, c };
            }
        }
    }
    for (auto & [il, entry] : by_il) {
        auto & [kv_layer, cache] = entry;
        if (!kv_layer->v) {
            throw kvmem_failure(KVMEM_E_UNSUPPORTED, "layer " + std::to_string(il) + " stores no V (compressed attention)");
        }
        kvmem_layer_state layer;
        auto & info = layer.info;
        layer.cache_k  = kv_layer->k_stream[0];
        layer.cache_v  = kv_layer->v_stream[0];
        info.il        = (int32_t) il;
        info.cache     = cache;
        info.n_head    = (int32_t) hparams.n_head(il);
        info.n_head_kv = (int32_t) hparams.n_head_kv(il);
        info.d_k       = (int32_t) hparams.n_embd_head_k(il);
        info.d_v       = (int32_t) hparams.n_embd_head_v(il);
        info.type_k    = layer.cache_k->type;
        info.type_v    = layer.cache_v->type;
        info.raw_k_row = (int64_t) ggml_row_size((ggml_type) params.raw_k_type, layer.cache_k->ne[0]);
        info.k_row     = (int64_t) layer.cache_k->nb[1];
        info.v_row     = (int64_t) layer.cache_v->nb[1];
        info.k_base    = ggml_backend_buffer_is_host(kv_layer->k->buffer) ? layer.cache_k->data : nullptr;
        info.v_base    = ggml_backend_buffer_is_host(kv_layer->v->buffer) ? layer.cache_v->data : nullptr;
        layer_of_il[il] = (int32_t) layers.size();
        layers.push_back(std::move(layer));
    }
    if (layers.empty()) {
        throw kvmem_failure(KVMEM_E_UNSUPPORTED, "no layer keeps K and V");
    }
    // a record: K of all layers, then V of all layers
    for (auto & layer : layers) {
        layer.info.k_offset = record_bytes;
        record_bytes += params.block_size*layer.info.raw_k_row;
    }
    for (auto & layer : layers) {
        layer.info.v_offset = record_bytes;
        record_bytes += params.block_size*layer.info.v_row;
    }
}

void llama_kvmem::alloc_capture() {
    std::map<ggml_backend_buffer_type_t, std::vector<kvmem_layer_state *>> by_buft;
    for (auto & layer : layers) {
        const auto * owner = layer.cache_k->view_src ? layer.cache_k->view_src : layer.cache_k;
        by_buft[ggml_backend_buffer_get_type(owner->buffer)].push_back(&layer);
    }
    for (auto & [buft, group] : by_buft) {
        ggml_context_ptr g { ggml_init({ (2*group.size() + 1)*ggml_tensor_overhead(), nullptr, true }) };
        for (auto * layer : group) {
            const auto & info = layer->info;
            layer->cap_k = ggml_new_tensor_2d(g.get(), (ggml_type) params.raw_k_type, (int64_t) info.d_k*info.n_head_kv, params.n_rows);
            ggml_format_name(layer->cap_k, "kvmem_k_l%d", info.il);
            if (info.cache == 0) {
                layer->cap_q = ggml_new_tensor_2d(g.get(), GGML_TYPE_F32, (int64_t) info.d_k*info.n_head, params.n_rows);
                ggml_format_name(layer->cap_q, "kvmem_q_l%d", info.il);
            }
        }
        ggml_backend_buffer_ptr buf { ggml_backend_alloc_ctx_tensors_from_buft(g.get(), buft) };
        if (!buf) {
            throw kvmem_failure(KVMEM_E_COMPUTE, "no memory for the capture rows");
        }
        ggml_backend_buffer_clear(buf.get(), 0);
        cap_bufs.push_back(std::move(buf));
        cap_ctxs.push_back(std::move(g));
    }
}

// Build (not run) one graph with capture on: every layer then says whether its raw K can be found.
void llama_kvmem::probe_graph() {
    ctx->set_kvmem(this, KVMEM_CAPTURE_K | KVMEM_CAPTURE_Q);
    auto * graph = llama_graph_reserve(ctx, std::min<uint32_t>(ctx->n_ubatch(), 32u), 1, 1);
    ctx->set_kvmem(this, 0);
    if (!graph) {
        throw kvmem_failure(KVMEM_E_COMPUTE, "the graph with capture could not be reserved");
    }
    for (auto & layer : layers) {
        const auto il = std::to_string(layer.info.il);
        if (layer.info.status == KVMEM_LAYER_UNSUPPORTED) {
            throw kvmem_failure(KVMEM_E_UNSUPPORTED, "layer " + il + ": " + layer.reason);
        }
        if (layer.info.status == KVMEM_LAYER_UNSEEN) {
            throw kvmem_failure(KVMEM_E_UNSUPPORTED, "layer " + il + ": its attention does not pass through the hooks");
        }
    }
}

void llama_kvmem::attach(llama_context * context, kvmem_params p) {
    ctx    = context;
    model  = &context->get_model();
    params = p;
    if (p.n_rows < 1 || p.block_size < 1 || p.n_rows < (int32_t) context->n_ubatch()) {
        throw kvmem_failure(KVMEM_E_ARGUMENT, "n_rows must hold a whole ubatch and block_size must be positive");
    }
    if (p.raw_k_type != GGML_TYPE_F16 && p.raw_k_type != GGML_TYPE_F32) {
        throw kvmem_failure(KVMEM_E_ARGUMENT, "raw K is stored as f16 or f32");
    }
    if (context->get_cparams().kvmem) {
        throw kvmem_failure(KVMEM_E_STATE, "the context has memory hooks already");
    }
    llama_synchronize(ctx);
    find_memory();
    add_layers();
    alloc_capture();

    auto * main = ctx->get_sched();
    std::vector<ggml_backend_t> backends;
    std::vector<ggml_backend_buffer_type_t> bufts;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(main); ++i) {
        backends.push_back(ggml_backend_sched_get_backend(main, i));
        bufts.push_back(ggml_backend_sched_get_buffer_type(main, backends.back()));
    }
    sched.reset(ggml_backend_sched_new(backends.data(), bufts.data(), (int) backends.size(), 4096, false, true));
    probe_graph();
}

//
// C API
//

int32_t      kvmem_abi_version(void) { return KVMEM_ABI_VERSION; }
const char * kvmem_patch_id(void)    { return KVMEM_PATCH_ID; }

int64_t kvmem_struct_size(const char * name) {
    if (strcmp(name, "kvmem_params")      == 0) { return sizeof(kvmem_params); }
    if (strcmp(name, "kvmem_layer_info")  == 0) { return sizeof(kvmem_layer_info); }
    if (strcmp(name, "kvmem_block_write") == 0) { return sizeof(kvmem_block_write); }
    return -1;
}

int32_t kvmem_init(llama_context * ctx, kvmem_params params, llama_kvmem ** out, char * err, int32_t n_err) {
    *out = nullptr;
    auto km = std::make_unique<llama_kvmem>();
    const int32_t rc = km->guard([&] { km->attach(ctx, params); return KVMEM_OK; });
    if (rc != KVMEM_OK) {
        if (ctx->get_cparams().kvmem == km.get()) {
            ctx->set_kvmem(nullptr, 0);
            llama_graph_reserve(ctx, 1, 1, 1); // drop graphs that know the hooks
        }
        snprintf(err, (size_t) n_err, "%s", km->last_error.c_str());
        return rc;
    }
    *out = km.release();
    return KVMEM_OK;
}

void kvmem_free(llama_kvmem * km) {
    if (km) {
        llama_synchronize(km->ctx);
        km->ctx->set_kvmem(nullptr, 0);
        km->set_place(nullptr, 0);
        delete km;
    }
}

const char * kvmem_last_error(const llama_kvmem * km) { return km->last_error.c_str(); }
int32_t kvmem_n_layer(const llama_kvmem * km)         { return (int32_t) km->layers.size(); }
int64_t kvmem_record_bytes(const llama_kvmem * km)    { return km->record_bytes; }
int32_t kvmem_n_cells(const llama_kvmem * km)         { return km->n_cells(); }

int32_t kvmem_layer(const llama_kvmem * km, int32_t i, kvmem_layer_info * out) {
    if (i < 0 || i >= (int32_t) km->layers.size()) {
        return KVMEM_E_ARGUMENT;
    }
    *out = km->layers[i].info;
    out->reason = km->layers[i].reason.c_str();
    return KVMEM_OK;
}

int32_t kvmem_set_exact(llama_kvmem * km, int32_t on) {
    return km->guard([&]() -> int32_t {
        auto * main = km->ctx->get_sched();
        for (int i = 0; i < ggml_backend_sched_get_n_backends(main); ++i) {
            auto * backend = ggml_backend_sched_get_backend(main, i);
            auto * dev     = ggml_backend_get_device(backend);
            if (ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_CPU) {
                continue;
            }
            using set_use_ref_t = void (*)(ggml_backend_t, bool);
            auto set_use_ref = (set_use_ref_t) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(dev), "ggml_backend_cpu_set_use_ref");
            if (!set_use_ref) {
                throw kvmem_failure(KVMEM_E_UNSUPPORTED, "the CPU backend has no reference mode");
            }
            set_use_ref(backend, on != 0);
        }
        return KVMEM_OK;
    });
}

int32_t kvmem_capture(llama_kvmem * km, uint32_t flags) {
    km->row_seq.clear();
    km->row_pos.clear();
    km->row_overflow = false;
    km->ctx->set_kvmem(km, flags);
    return KVMEM_OK;
}

int32_t kvmem_captured(llama_kvmem * km, int32_t * seq, int32_t * pos, int32_t n_max) {
    return km->guard([&]() -> int32_t {
        llama_synchronize(km->ctx);
        if (km->row_overflow) {
            throw kvmem_failure(KVMEM_E_STATE, "more tokens were decoded than there are capture rows");
        }
        const int32_t n = (int32_t) km->row_pos.size();
        if (n > n_max) {
            throw kvmem_failure(KVMEM_E_ARGUMENT, "the arrays are smaller than the captured rows");
        }
        std::copy(km->row_seq.begin(), km->row_seq.end(), seq);
        std::copy(km->row_pos.begin(), km->row_pos.end(), pos);
        return n;
    });
}
