// restore_rows.h written once for every instruction set. Included inside an anonymous namespace and under the target
// of the instruction set; S is its set of vector operations.

// One lane, for what is left over after whole vectors.
struct one_lane {
    using vec = float;
    static constexpr int lanes = 1;
    static inline vec load(const float * p) { return *p; }
    static inline vec load(const uint16_t * p) { return kvmem::half_to_float(*p); }
    static inline void store(uint16_t * p, vec x) { *p = kvmem::float_to_half(x); }
    static inline vec mul(vec a, vec b) {
        vec product = a * b;
        KVMEM_ROUND(product);
        return product;
    }
    static inline vec sub(vec a, vec b) { return a - b; }
    static inline vec add(vec a, vec b) { return a + b; }
    static inline vec fma(vec a, vec b, vec c) { return __builtin_fmaf(a, b, c); }
    static inline vec fms(vec a, vec b, vec c) { return __builtin_fmaf(a, b, -c); }  // a*b - c
    static inline vec fnma(vec a, vec b, vec c) { return __builtin_fmaf(-a, b, c); } // c - a*b
    static inline vec even(vec a, vec) { return a; }
    static inline vec odd(vec, vec b) { return b; }
    static inline vec first(vec y0, vec) { return y0; }
    static inline vec second(vec, vec y1) { return y1; }
};

template <class S, int Form> inline void rotate(
        typename S::vec x0, typename S::vec x1, typename S::vec c, typename S::vec s,
        typename S::vec & y0, typename S::vec & y1) {
    constexpr bool y0_keeps_second = Form == KVMEM_ROPE_FMA_AA || Form == KVMEM_ROPE_FMA_AB;
    constexpr bool y1_keeps_second = Form == KVMEM_ROPE_FMA_AA || Form == KVMEM_ROPE_FMA_BA;
    if constexpr (Form == KVMEM_ROPE_PLAIN) {
        y0 = S::sub(S::mul(x0, c), S::mul(x1, s));
        y1 = S::add(S::mul(x0, s), S::mul(x1, c));
        return;
    }
    y0 = y0_keeps_second ? S::fms(x0, c, S::mul(x1, s)) : S::fnma(x1, s, S::mul(x0, c));
    y1 = y1_keeps_second ? S::fma(x0, s, S::mul(x1, c)) : S::fma(x1, c, S::mul(x0, s));
}

// Pairs i .. i+lanes-1 of every KV head of one row; the table's entries are unpacked once for all heads.
template <class S, int Form, int Pairing, class Src> inline void rotate_pairs(
        const kvmem_restore_layer & l, const Src * x, uint16_t * y, const float * table, int i) {
    using vec = typename S::vec;
    const vec t0 = S::load(table + 2 * i);
    const vec t1 = S::load(table + 2 * i + S::lanes);
    const vec c = S::even(t0, t1);
    const vec s = S::odd(t0, t1);
    const int half = l.n_dims / 2;
    const int a = Pairing == KVMEM_PAIR_HALVES ? l.rot0 + i : l.rot0 + 2 * i;
    const int b = Pairing == KVMEM_PAIR_HALVES ? a + half : a + S::lanes;
    for (int h = 0; h < l.n_head_kv; ++h, x += l.d, y += l.d) {
        const vec u = S::load(x + a);
        const vec v = S::load(x + b);
        vec y0, y1;
        if constexpr (Pairing == KVMEM_PAIR_HALVES) {
            rotate<S, Form>(u, v, c, s, y0, y1);
            S::store(y + a, y0);
            S::store(y + b, y1);
        } else {
            rotate<S, Form>(S::even(u, v), S::odd(u, v), c, s, y0, y1);
            S::store(y + a, S::first(y0, y1));
            S::store(y + b, S::second(y0, y1));
        }
    }
}

template <class S, class Src> inline void copy_dims(const Src * x, uint16_t * y, int n) {
    if constexpr (sizeof(Src) == 2) {
        std::memcpy(y, x, size_t(n) * 2);
    } else {
        int i = 0;
        for (; i + S::lanes <= n; i += S::lanes) {
            S::store(y + i, S::load(x + i));
        }
        for (; i < n; ++i) {
            y[i] = kvmem::float_to_half(x[i]);
        }
    }
}

template <class S, int Form, int Pairing, class Src> void restore_rows(const kvmem::rows_args & a) {
    const kvmem_restore_layer & l = *a.layer;
    const int half = l.n_dims / 2;
    const int rot1 = l.rot0 + l.n_dims;
    for (int32_t t = 0; t < a.n; ++t) {
        const Src * x = reinterpret_cast<const Src *>(a.raw + t * l.k_stride);
        uint16_t * y = reinterpret_cast<uint16_t *>(l.k_cells + a.cells[t] * l.k_cell_stride);
        if (l.n_dims == 0) {
            copy_dims<S>(x, y, l.n_head_kv * l.d);
            continue;
        }
        const float * table = l.cos_sin + (int64_t(a.pos0) + t) * l.n_dims;
        int i = 0;
        for (; i + S::lanes <= half; i += S::lanes) {
            rotate_pairs<S, Form, Pairing>(l, x, y, table, i);
        }
        for (; i < half; ++i) {
            rotate_pairs<one_lane, Form, Pairing>(l, x, y, table, i);
        }
        if (l.n_dims < l.d) {
            for (int h = 0; h < l.n_head_kv; ++h) {
                copy_dims<S>(x + h * l.d, y + h * l.d, l.rot0);
                copy_dims<S>(x + h * l.d + rot1, y + h * l.d + rot1, l.d - rot1);
            }
        }
    }
}

template <class S, int Form> void restore_form(const kvmem::rows_args & a) {
    const bool halves = a.layer->pairing == KVMEM_PAIR_HALVES;
    if (a.row_type == KVMEM_ROW_F16) {
        halves ? restore_rows<S, Form, KVMEM_PAIR_HALVES, uint16_t>(a)
               : restore_rows<S, Form, KVMEM_PAIR_ADJACENT, uint16_t>(a);
    } else {
        halves ? restore_rows<S, Form, KVMEM_PAIR_HALVES, float>(a)
               : restore_rows<S, Form, KVMEM_PAIR_ADJACENT, float>(a);
    }
}

template <class S> void restore_any(const kvmem::rows_args & a) {
    switch (a.form) {
        case KVMEM_ROPE_FMA_AA: restore_form<S, KVMEM_ROPE_FMA_AA>(a); break;
        case KVMEM_ROPE_FMA_AB: restore_form<S, KVMEM_ROPE_FMA_AB>(a); break;
        case KVMEM_ROPE_FMA_BA: restore_form<S, KVMEM_ROPE_FMA_BA>(a); break;
        case KVMEM_ROPE_FMA_BB: restore_form<S, KVMEM_ROPE_FMA_BB>(a); break;
        default:                restore_form<S, KVMEM_ROPE_PLAIN>(a); break;
    }
}
