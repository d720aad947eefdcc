// The strip of score_strip.h, written once for every instruction set. Included inside an anonymous namespace and under
// the target of the instruction set; S is its set of vector operations.

template <class S> void widen_panel(const kvmem::strip_args & a, int64_t c0, int64_t count) {
    const int64_t in_chunk = (int64_t(1) << a.chunk_shift) - 1;
    const int64_t head = a.mean_offset << a.chunk_shift;
    float * out = a.panel;
    for (int64_t j = 0; j < count;) {
        const int64_t first = a.candidates[c0 + j];
        int64_t run = 1; // neighbours of one chunk lie side by side
        while (j + run < count && a.candidates[c0 + j + run] == first + run && ((first + run) & in_chunk)) {
            ++run;
        }
        const uint16_t * means =
            static_cast<const uint16_t *>(a.chunks[first >> a.chunk_shift]) + head + (first & in_chunk) * a.d;
        const int64_t n = run * a.d;
        int64_t i = 0;
        for (; i + S::lanes <= n; i += S::lanes) {
            S::store(out + i, S::widen(means + i));
        }
        for (; i < n; ++i) {
            out[i] = kvmem::half_to_float(means[i]);
        }
        out += n;
        j += run;
    }
}

// Rows of ggml's block formats: groups of 32 values with one float16 scale before them.
inline void unpack_q4_0(const uint8_t * row, int64_t n_groups, float * out) {
    for (int64_t g = 0; g < n_groups; ++g, row += 18, out += 32) {
        uint16_t half;
        std::memcpy(&half, row, 2);
        const float scale = kvmem::half_to_float(half);
        for (int i = 0; i < 16; ++i) {
            out[i] = float(int(row[2 + i] & 15) - 8) * scale;
            out[i + 16] = float(int(row[2 + i] >> 4) - 8) * scale;
        }
    }
}

inline void unpack_q8_0(const uint8_t * row, int64_t n_groups, float * out) {
    for (int64_t g = 0; g < n_groups; ++g, row += 34, out += 32) {
        uint16_t half;
        std::memcpy(&half, row, 2);
        const float scale = kvmem::half_to_float(half);
        for (int i = 0; i < 32; ++i) {
            out[i] = float(int8_t(row[2 + i])) * scale;
        }
    }
}

inline void unpack_tokens(const kvmem::strip_args & a, int64_t c) {
    const int64_t number = a.candidates[c], in_chunk = (int64_t(1) << a.chunk_shift) - 1;
    const int64_t block_bytes = a.block_tokens * a.row_bytes;
    const uint8_t * rows = static_cast<const uint8_t *>(a.chunks[number >> a.chunk_shift]) +
                           (a.mean_offset << a.chunk_shift) + (number & in_chunk) * block_bytes;
    const int64_t n_groups = int64_t(a.counts[c]) * (a.d / 32); // the rows of a block have nothing between them
    if (a.index_type == KVMEM_INDEX_TOKENS_Q4_0) {
        unpack_q4_0(rows, n_groups, a.panel);
    } else {
        unpack_q8_0(rows, n_groups, a.panel);
    }
}

template <class S, int NV> struct strip {
    using vec = typename S::vec;
    static constexpr int rows = NV * S::lanes;
    static constexpr int step = S::accumulators / NV; // blocks per pass over d

    // s[j][row] = q[.][row] . k[j][.] for `count` blocks (all of them when Full), and the rows' running maximum.
    template <bool Full> static inline void dot(const float * q, const float * k, int d, int count, float * s, vec * top) {
        vec acc[step][NV];
        KVMEM_UNROLL
        for (int j = 0; j < step; ++j) {
            KVMEM_UNROLL
            for (int v = 0; v < NV; ++v) {
                acc[j][v] = S::zero();
            }
        }
        for (int i = 0; i < d; ++i) {
            vec row[NV];
            KVMEM_UNROLL
            for (int v = 0; v < NV; ++v) {
                row[v] = S::load(q + i * rows + v * S::lanes);
            }
            KVMEM_UNROLL
            for (int j = 0; j < step; ++j) {
                const vec mean = S::broadcast(k[j * d + i]);
                KVMEM_UNROLL
                for (int v = 0; v < NV; ++v) {
                    acc[j][v] = S::fma(mean, row[v], acc[j][v]);
                }
            }
        }
        KVMEM_UNROLL
        for (int j = 0; j < step; ++j) {
            if (Full || j < count) {
                KVMEM_UNROLL
                for (int v = 0; v < NV; ++v) {
                    S::store(s + j * rows + v * S::lanes, acc[j][v]);
                    top[v] = S::max(top[v], acc[j][v]);
                }
            }
        }
    }

    static void tile(const kvmem::strip_args & a, int64_t begin, int64_t end, float * tile_top, float * tile_sum) {
        vec top[NV];
        for (int v = 0; v < NV; ++v) {
            top[v] = S::broadcast(-__builtin_huge_valf());
        }
        for (int64_t p = begin; p < end; p += kvmem::panel_blocks) {
            const int64_t count = end - p < kvmem::panel_blocks ? end - p : kvmem::panel_blocks;
            widen_panel<S>(a, p, count);
            for (int64_t j = 0; j < count; j += step) {
                float * s = a.weights + (p + j) * rows;
                if (count - j >= step) {
                    dot<true>(a.q, a.panel + j * a.d, a.d, step, s, top);
                } else {
                    dot<false>(a.q, a.panel + j * a.d, a.d, int(count - j), s, top);
                }
            }
        }
        vec sum[NV];
        for (int v = 0; v < NV; ++v) {
            S::store(tile_top + v * S::lanes, top[v]);
            sum[v] = S::zero();
        }
        // short sums of short sums: a tile of everything must not lose digits against a tile of one
        for (int64_t p = begin; p < end; p += kvmem::panel_blocks) {
            const int64_t stop = end - p < kvmem::panel_blocks ? end : p + kvmem::panel_blocks;
            vec part[NV];
            for (int v = 0; v < NV; ++v) {
                part[v] = S::zero();
            }
            for (int64_t c = p; c < stop; ++c) {
                KVMEM_UNROLL
                for (int v = 0; v < NV; ++v) {
                    float * s = a.weights + c * rows + v * S::lanes;
                    const vec e = S::exp2(S::sub(S::load(s), top[v]));
                    S::store(s, e);
                    part[v] = S::add(part[v], e);
                }
            }
            for (int v = 0; v < NV; ++v) {
                sum[v] = S::add(sum[v], part[v]);
            }
        }
        for (int v = 0; v < NV; ++v) {
            S::store(tile_sum + v * S::lanes, sum[v]);
        }
    }

    // The same over the tokens of the tile's blocks: a block's weight is the sum of its tokens' weights.
    static void tile_tokens(
            const kvmem::strip_args & a, int64_t begin, int64_t end, float * tile_top, float * tile_sum) {
        vec top[NV];
        for (int v = 0; v < NV; ++v) {
            top[v] = S::broadcast(-__builtin_huge_valf());
        }
        float * s = a.logits;
        for (int64_t c = begin; c < end; ++c) {
            unpack_tokens(a, c);
            const int count = a.counts[c];
            for (int j = 0; j < count; j += step, s += step * rows) {
                if (count - j >= step) {
                    dot<true>(a.q, a.panel + int64_t(j) * a.d, a.d, step, s, top);
                } else {
                    dot<false>(a.q, a.panel + int64_t(j) * a.d, a.d, count - j, s, top);
                    s -= (step - (count - j)) * rows;
                }
            }
        }
        vec sum[NV];
        for (int v = 0; v < NV; ++v) {
            S::store(tile_top + v * S::lanes, top[v]);
            sum[v] = S::zero();
        }
        s = a.logits;
        for (int64_t c = begin; c < end; ++c) {
            vec part[NV];
            for (int v = 0; v < NV; ++v) {
                part[v] = S::zero();
            }
            for (int j = 0; j < a.counts[c]; ++j, s += rows) {
                KVMEM_UNROLL
                for (int v = 0; v < NV; ++v) {
                    part[v] = S::add(part[v], S::exp2(S::sub(S::load(s + v * S::lanes), top[v])));
                }
            }
            for (int v = 0; v < NV; ++v) {
                S::store(a.weights + c * rows + v * S::lanes, part[v]);
                sum[v] = S::add(sum[v], part[v]);
            }
        }
        for (int v = 0; v < NV; ++v) {
            S::store(tile_sum + v * S::lanes, sum[v]);
        }
    }

    // tile_top becomes what the weights of the tile are to be multiplied by.
    static void finish_rows(const kvmem::strip_args & a, int64_t n_tiles) {
        alignas(64) float top[rows];
        alignas(64) float scale[rows];
        double sum[rows];
        for (int r = 0; r < rows; ++r) {
            top[r] = a.tile_top[r];
            sum[r] = 0.0;
        }
        for (int64_t t = 1; t < n_tiles; ++t) {
            for (int r = 0; r < rows; ++r) {
                const float x = a.tile_top[t * rows + r];
                top[r] = x > top[r] ? x : top[r];
            }
        }
        for (int64_t t = 0; t < n_tiles; ++t) {
            for (int v = 0; v < NV; ++v) {
                float * tile_top = a.tile_top + t * rows + v * S::lanes;
                S::store(tile_top, S::exp2(S::sub(S::load(tile_top), S::load(top + v * S::lanes))));
            }
            for (int r = 0; r < rows; ++r) {
                sum[r] += double(a.tile_top[t * rows + r]) * double(a.tile_sum[t * rows + r]);
            }
        }
        for (int r = 0; r < rows; ++r) {
            scale[r] = r < a.n_rows ? float(1.0 / sum[r]) : 0.0f;
        }
        for (int64_t t = 0; t < n_tiles; ++t) {
            for (int r = 0; r < rows; ++r) {
                a.tile_top[t * rows + r] *= scale[r];
            }
        }
    }

    static inline vec weigh(const float * weights, const vec * factor) {
        vec sum = S::mul(S::load(weights), factor[0]);
        KVMEM_UNROLL
        for (int v = 1; v < NV; ++v) {
            sum = S::fma(S::load(weights + v * S::lanes), factor[v], sum);
        }
        return sum;
    }

    static void sum_rows(const kvmem::strip_args & a, int64_t begin, int64_t end, const float * tile_factor) {
        vec factor[NV];
        for (int v = 0; v < NV; ++v) {
            factor[v] = S::load(tile_factor + v * S::lanes);
        }
        int64_t c = begin;
        for (; c + S::lanes <= end; c += S::lanes) {
            vec sums[S::lanes];
            KVMEM_UNROLL
            for (int j = 0; j < S::lanes; ++j) {
                sums[j] = weigh(a.weights + (c + j) * rows, factor);
            }
            S::store_unaligned(a.part + c, S::sum_each(sums));
        }
        for (; c < end; ++c) {
            a.part[c] = S::sum(weigh(a.weights + c * rows, factor));
        }
    }

    template <bool Tokens> static void run(const kvmem::strip_args & a) {
        int64_t n_tiles = 0;
        for (int64_t c = 0; c < a.n; c += a.tile, ++n_tiles) {
            const int64_t end = a.n - c < a.tile ? a.n : c + a.tile;
            float * const tile_top = a.tile_top + n_tiles * rows;
            float * const tile_sum = a.tile_sum + n_tiles * rows;
            if (Tokens) {
                tile_tokens(a, c, end, tile_top, tile_sum);
            } else {
                tile(a, c, end, tile_top, tile_sum);
            }
        }
        finish_rows(a, n_tiles);
        for (int64_t t = 0; t < n_tiles; ++t) {
            const int64_t c = t * a.tile;
            sum_rows(a, c, a.n - c < a.tile ? a.n : c + a.tile, a.tile_top + t * rows);
        }
    }
};

template <class S, bool Tokens> void run_strip(const kvmem::strip_args & a) {
    switch (a.n_vectors) {
        case 1: strip<S, 1>::template run<Tokens>(a); break;
        case 2: strip<S, 2>::template run<Tokens>(a); break;
        case 3: strip<S, 3>::template run<Tokens>(a); break;
        default: strip<S, S::max_vectors>::template run<Tokens>(a); break;
    }
}
