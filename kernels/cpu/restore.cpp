// Restore of blocks into cells: checks, division into (block, layer) pieces, threads.
#include "restore_rows.h"
#include "simd.h"
#include "threads.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace kvmem {
namespace {

constexpr int64_t pieces_at_a_time = 8;
constexpr int64_t bytes_per_thread = 256 << 10; // of output, that pay for starting a thread

bool valid_layer(const kvmem_restore_layer & l, int64_t element) {
    if (l.n_head_kv < 1 || l.d < 1 || l.k_offset < 0 || l.v_offset < 0 || l.v_row < 0 || !l.k_cells || !l.v_cells ||
        l.k_stride < int64_t(l.n_head_kv) * l.d * element || l.k_cell_stride < int64_t(l.n_head_kv) * l.d * 2 ||
        l.v_cell_stride < l.v_row) {
        return false;
    }
    if (l.n_dims == 0) {
        return true;
    }
    return l.n_dims > 0 && l.n_dims % 2 == 0 && l.rot0 >= 0 && l.rot0 + l.n_dims <= l.d && l.cos_sin &&
           (l.pairing == KVMEM_PAIR_ADJACENT || l.pairing == KVMEM_PAIR_HALVES);
}

bool valid_block(const kvmem_restore_block & b, int64_t n_cells, int64_t n_positions) {
    if (b.n < 0 || b.slot0 < 0 || b.pos0 < 0 || int64_t(b.pos0) + b.n > n_positions || (b.n > 0 && (!b.record || !b.cells))) {
        return false;
    }
    return std::all_of(b.cells, b.cells + b.n, [&](int32_t c) { return c >= 0 && c < n_cells; });
}

void copy_v(const kvmem_restore_layer & l, const kvmem_restore_block & b) {
    const uint8_t * v = b.record + l.v_offset + b.slot0 * l.v_row;
    for (int32_t t = 0; t < b.n;) {
        int32_t run = 1; // rows of neighbouring cells in one copy
        while (l.v_cell_stride == l.v_row && t + run < b.n && b.cells[t + run] == b.cells[t] + run) {
            ++run;
        }
        std::memcpy(l.v_cells + b.cells[t] * l.v_cell_stride, v + t * l.v_row, size_t(run * l.v_row));
        t += run;
    }
}

restore_rows_fn rows_for(int isa) {
#if KVMEM_X86
    switch (isa) {
        case KVMEM_ISA_AVX512: return restore_rows_avx512;
        case KVMEM_ISA_AVX2:   return restore_rows_avx2;
        default: break;
    }
#else
    (void)isa;
#endif
    return restore_rows_portable;
}

} // namespace
} // namespace kvmem

int32_t kvmem_restore_f16(
        const struct kvmem_restore_layer * layers, int32_t n_layers, int32_t row_type,
        const struct kvmem_restore_block * blocks, int32_t n_blocks, int64_t n_cells,
        int32_t form, int32_t n_threads, int32_t isa) {
    using namespace kvmem;
    if (n_layers < 0 || n_blocks < 0 || (n_layers > 0 && !layers) || (n_blocks > 0 && !blocks) || n_threads < 1 ||
        (row_type != KVMEM_ROW_F32 && row_type != KVMEM_ROW_F16) || form < KVMEM_ROPE_PLAIN || form > KVMEM_ROPE_FMA_BB) {
        return KVMEM_KERNELS_E_ARGUMENT;
    }
    const int64_t element = row_type == KVMEM_ROW_F16 ? 2 : 4;
    int64_t n_positions = INT64_MAX;
    int64_t bytes = 0;
    for (int32_t i = 0; i < n_layers; ++i) {
        if (!valid_layer(layers[i], element)) {
            return KVMEM_KERNELS_E_ARGUMENT;
        }
        n_positions = layers[i].n_dims ? std::min(n_positions, layers[i].n_positions) : n_positions;
        bytes += layers[i].v_row + int64_t(layers[i].n_head_kv) * layers[i].d * 2;
    }
    int64_t n_tokens = 0;
    for (int32_t i = 0; i < n_blocks; ++i) {
        if (!valid_block(blocks[i], n_cells, n_positions)) {
            return KVMEM_KERNELS_E_ARGUMENT;
        }
        n_tokens += blocks[i].n;
    }
    isa = resolve_isa(isa);
    if (isa < 0) {
        return KVMEM_KERNELS_E_ISA;
    }
    const restore_rows_fn rows = rows_for(isa);
    const int64_t n_pieces = int64_t(n_blocks) * n_layers;
    const int64_t useful = 1 + bytes * n_tokens / bytes_per_thread;
    const int64_t turns = (n_pieces + pieces_at_a_time - 1) / pieces_at_a_time;
    std::atomic<int64_t> next{0};
    try {
        run_threads(int(std::min<int64_t>({n_threads, useful, std::max<int64_t>(turns, 1)})), [&] {
            for (;;) {
                const int64_t first = next.fetch_add(pieces_at_a_time);
                if (first >= n_pieces) {
                    return;
                }
                for (int64_t i = first; i < std::min(first + pieces_at_a_time, n_pieces); ++i) {
                    const kvmem_restore_layer & l = layers[i % n_layers];
                    const kvmem_restore_block & b = blocks[i / n_layers];
                    rows({&l, b.record + l.k_offset + b.slot0 * l.k_stride, b.cells, b.n, b.pos0, row_type, form});
                    copy_v(l, b);
                }
            }
        });
    } catch (const std::exception &) {
        return KVMEM_KERNELS_E_MEMORY;
    }
    return KVMEM_KERNELS_OK;
}
