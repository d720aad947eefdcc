// Block scores: checks, division into strips, threads.
#include "kvmem_kernels.h"
#include "score_strip.h"
#include "simd.h"
#include "threads.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace kvmem {
namespace {

constexpr int64_t default_tile = 96;
constexpr int64_t default_token_tile = 8; // its logits stay in the L2 cache
constexpr int64_t weight_bytes = 64 << 20; // of one thread; beyond it fewer rows at a time, which is slower
constexpr double  log2e = 1.4426950408889634;
constexpr int64_t work_per_thread = 4 << 20; // multiply-adds that pay for starting a thread

struct strip_task {
    const kvmem_score_layer * layer;
    int32_t head_kv;
    int32_t row0; // rows of a KV head: query token x query heads of the group
    int32_t n_rows;
};

bool is_token_index(const kvmem_score_args & a) { return a.index_type != KVMEM_INDEX_MEAN_F16; }

bool valid_tokens(const kvmem_score_args & a) {
    if (a.block_tokens < 1 || (a.n_candidates > 0 && !a.counts)) {
        return false;
    }
    for (int32_t i = 0; i < a.n_layers; ++i) {
        if (a.layers[i].n_head_kv != 1 || !kvmem_token_row_bytes(a.index_type, a.layers[i].d)) {
            return false;
        }
    }
    for (int64_t i = 0; i < a.n_candidates; ++i) {
        if (a.counts[i] < 1 || a.counts[i] > a.block_tokens) {
            return false;
        }
    }
    return true;
}

bool valid(const kvmem_score_args & a) {
    if (a.n_layers < 1 || a.n_query < 1 || a.n_threads < 1 || a.n_candidates < 0 || a.n_chunks < 0 || a.tile < 0 ||
        a.chunk_shift < 0 || a.chunk_shift > 30 || !a.layers) {
        return false;
    }
    for (int32_t i = 0; i < a.n_layers; ++i) {
        const kvmem_score_layer & l = a.layers[i];
        if (!l.q || l.d < 1 || l.n_head_kv < 1 || l.n_head < 1 || l.n_head % l.n_head_kv || l.mean_offset < 0) {
            return false;
        }
    }
    if (is_token_index(a) && !valid_tokens(a)) {
        return false;
    }
    if (a.n_candidates == 0) {
        return true;
    }
    if (!a.chunks || !a.candidates || !a.scores || a.candidates[0] < 0) {
        return false;
    }
    for (int64_t i = 1; i < a.n_candidates; ++i) {
        if (a.candidates[i] <= a.candidates[i - 1]) {
            return false;
        }
    }
    return a.candidates[a.n_candidates - 1] >> a.chunk_shift < a.n_chunks;
}

// Query rows of one strip, transposed so that a vector holds one dim of `lanes` rows.
void pack_query(const strip_task & t, int width, float * out) {
    const kvmem_score_layer & l = *t.layer;
    const int32_t group = l.n_head / l.n_head_kv;
    const double factor = l.scale * log2e; // the softmax is taken in powers of two
    std::memset(out, 0, sizeof(float) * size_t(l.d) * size_t(width));
    for (int32_t r = 0; r < t.n_rows; ++r) {
        const int64_t token = (t.row0 + r) / group;
        const int64_t head = int64_t(t.head_kv) * group + (t.row0 + r) % group;
        const float * q = l.q + (token * l.n_head + head) * l.d;
        for (int32_t i = 0; i < l.d; ++i) {
            out[int64_t(i) * width + r] = float(double(q[i]) * factor);
        }
    }
}

int64_t rows_per_head(const kvmem_score_args & a, const kvmem_score_layer & l) {
    return int64_t(a.n_query) * (l.n_head / l.n_head_kv);
}

// One or two query tokens do not fill the widest vectors, and lanes that hold nothing cost as much as others.
const strip_kernel & choose_kernel(const kvmem_score_args & a, int isa) {
    int64_t rows = 0;
    for (int32_t i = 0; i < a.n_layers; ++i) {
        rows = std::max(rows, rows_per_head(a, a.layers[i]));
    }
    if (isa == KVMEM_ISA_AVX512 && rows <= strip_kernel_for(KVMEM_ISA_AVX2).lanes) {
        return strip_kernel_for(KVMEM_ISA_AVX2);
    }
    return strip_kernel_for(isa);
}

void score(const kvmem_score_args & a, int isa) {
    const strip_kernel & kernel = choose_kernel(a, isa);
    const int64_t n = a.n_candidates;
    const bool tokens = is_token_index(a);
    const int64_t tile = std::min(a.tile ? a.tile : tokens ? default_token_tile : default_tile, n);
    const int64_t panel_rows = tokens ? a.block_tokens + panel_spare : panel_blocks;
    const int64_t n_tiles = (n + tile - 1) / tile;

    // Fewer rows at a time when there are many candidates, never by the number of threads: the sums' order is fixed.
    const int64_t fit = weight_bytes / (n * kernel.lanes * int64_t(sizeof(float)));
    const int max_vectors = int(std::clamp<int64_t>(fit, 1, kernel.max_vectors));

    std::vector<strip_task> tasks;
    int64_t max_d = 0;
    double work = 0.0, n_rows_total = 0.0;
    for (int32_t i = 0; i < a.n_layers; ++i) {
        const kvmem_score_layer & l = a.layers[i];
        const int64_t rows = rows_per_head(a, l);
        max_d = std::max<int64_t>(max_d, l.d);
        n_rows_total += l.n_head;
        work += double(rows) * l.n_head_kv * double(l.d) * double(n) * double(tokens ? a.block_tokens : 1);
        for (int32_t h = 0; h < l.n_head_kv; ++h) {
            // strips of equal size rather than full ones and a remainder
            const int64_t strips = (rows + max_vectors * kernel.lanes - 1) / (max_vectors * kernel.lanes);
            const int64_t vectors = (rows + kernel.lanes - 1) / kernel.lanes;
            const int64_t height = (vectors + strips - 1) / strips * kernel.lanes;
            for (int64_t r = 0; r < rows; r += height) {
                tasks.push_back({&l, h, int32_t(r), int32_t(std::min(height, rows - r))});
            }
        }
    }

    const int64_t useful = 1 + int64_t(work / double(work_per_thread));
    const int n_threads = int(std::min<int64_t>({a.n_threads, int64_t(tasks.size()), useful}));
    std::fill(a.scores, a.scores + n, 0.0);
    ordered_sum total(a.scores, n, n_threads);
    std::atomic<int64_t> next{0};
    run_threads(n_threads, [&] {
        const int64_t width = int64_t(max_vectors) * kernel.lanes;
        aligned_array<float> query(size_t(max_d * width));
        aligned_array<float> panel(size_t(panel_rows * max_d));
        aligned_array<float> logits(size_t(tokens ? tile * a.block_tokens * width : 0));
        aligned_array<float> weights(size_t(n * width));
        aligned_array<float> tiles(size_t(2 * n_tiles * width));
        std::memset(panel.get(), 0, sizeof(float) * size_t(panel_rows * max_d)); // read past the last row
        for (;;) {
            const int64_t i = next.fetch_add(1);
            if (i >= int64_t(tasks.size())) {
                return;
            }
            const strip_task & t = tasks[size_t(i)];
            strip_args s{};
            s.chunks = a.chunks;
            s.candidates = a.candidates;
            s.counts = a.counts;
            s.n = n;
            s.tile = tile;
            s.mean_offset = t.layer->mean_offset + int64_t(t.head_kv) * t.layer->d;
            s.chunk_shift = a.chunk_shift;
            s.index_type = a.index_type;
            s.block_tokens = a.block_tokens;
            s.row_bytes = tokens ? kvmem_token_row_bytes(a.index_type, t.layer->d) : 0;
            s.d = t.layer->d;
            s.n_rows = t.n_rows;
            s.n_vectors = (t.n_rows + kernel.lanes - 1) / kernel.lanes;
            s.q = query.get();
            s.panel = panel.get();
            s.logits = logits.get();
            s.weights = weights.get();
            s.tile_top = tiles.get();
            s.tile_sum = tiles.get() + n_tiles * width;
            pack_query(t, s.n_vectors * kernel.lanes, query.get());
            s.part = total.begin(i);
            (tokens ? kernel.run_tokens : kernel.run)(s);
            total.end(i);
        }
    });
    for (int64_t c = 0; c < n; ++c) {
        a.scores[c] /= n_rows_total;
    }
}

} // namespace
} // namespace kvmem

int32_t kvmem_score(const struct kvmem_score_args * args) {
    if (!args || !kvmem::valid(*args)) {
        return KVMEM_KERNELS_E_ARGUMENT;
    }
    const int isa = kvmem::resolve_isa(args->isa);
    if (isa < 0) {
        return KVMEM_KERNELS_E_ISA;
    }
    if (args->n_candidates == 0) {
        return KVMEM_KERNELS_OK;
    }
    try {
        kvmem::score(*args, isa);
    } catch (const std::exception &) {
        return KVMEM_KERNELS_E_MEMORY; // std::bad_alloc is the only one that can be thrown
    }
    return KVMEM_KERNELS_OK;
}
