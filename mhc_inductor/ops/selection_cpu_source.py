"""The C++ of selection attention on a CPU, which :mod:`mhc_inductor.ops.selection_cpu_core` compiles and calls.

Each query reads the rows of the keys that it selects where they lie; nothing is gathered. Every sum has a fixed order that
does not depend on the number of threads. It needs the vector extensions of GCC or Clang, and no header of PyTorch.
"""

SOURCE = r"""
// SCALAR is float or double; HEADS, 1, 2 or 4, is the number of heads of a query that are multiplied at once.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

namespace {

// ---- vectors ------------------------------------------------------------------------------------------------------

template <typename T>
struct Integer;
template <>
struct Integer<float> {
    typedef int32_t type;
};
template <>
struct Integer<double> {
    typedef int64_t type;
};

template <typename T>
struct Lanes {
    typedef typename Integer<T>::type Int;
    static constexpr int count = VECTOR_BYTES / sizeof(T);
    typedef T type __attribute__((vector_size(VECTOR_BYTES)));
    typedef Int ints __attribute__((vector_size(VECTOR_BYTES)));
};
template <typename T>
using Vec = typename Lanes<T>::type;

template <typename T>
inline Vec<T> load(const T* p) {
    Vec<T> v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

template <typename T>
inline void store(T* p, Vec<T> v) {
    std::memcpy(p, &v, sizeof v);
}

template <typename T>
inline Vec<T> splat(T x) {
    return x - Vec<T>{};
}

template <typename T>
inline Vec<T> larger(Vec<T> a, Vec<T> b) {  // NaN if either is
    return (a > b) | (a != a) ? a : b;
}

template <typename T>
inline Vec<T> finite(Vec<T> v) {
    return (v - v) == 0 ? v : Vec<T>{};
}

// Picks, with lane bit `bit`, the halves that `merged` adds.
constexpr int low_index(int i, int bit, int count) { return i & bit ? count + i - bit : i; }
constexpr int high_index(int i, int bit, int count) { return i & bit ? count + i : i + bit; }

template <typename T, int bit, int... I>
inline Vec<T> merged(Vec<T> a, Vec<T> b, std::integer_sequence<int, I...>) {
    constexpr int n = Lanes<T>::count;
#if defined(__clang__)
    return __builtin_shufflevector(a, b, low_index(I, bit, n)...) + __builtin_shufflevector(a, b, high_index(I, bit, n)...);
#else
    typedef typename Lanes<T>::ints Ints;
    return __builtin_shuffle(a, b, Ints{low_index(I, bit, n)...}) + __builtin_shuffle(a, b, Ints{high_index(I, bit, n)...});
#endif
}

// Returns the vector whose lane i is the sum of the lanes of v[i]. Overwrites v.
template <typename T, int bit = 1>
inline Vec<T> sums(Vec<T>* v) {
    constexpr int n = Lanes<T>::count;
    if constexpr (bit < n) {
        for (int i = 0; i < n / bit; i += 2) v[i / 2] = merged<T, bit>(v[i], v[i + 1], std::make_integer_sequence<int, n>());
        return sums<T, 2 * bit>(v);
    } else {
        return v[0];
    }
}

// e**x to about one unit in the last place; 0 where the result would be below the smallest normal number.
inline Vec<float> exponential(Vec<float> x) {
    typedef Lanes<float>::ints Ints;
    const Vec<float> half = x < 0.0f ? splat(-0.5f) : splat(0.5f);
    const Ints n = __builtin_convertvector(x * 1.44269504088896341f + half, Ints);
    const Vec<float> whole = __builtin_convertvector(n, Vec<float>);
    const Vec<float> r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    Vec<float> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * r) * r + r + 1.0f;
    const Ints bits = (n + 127) << 23;
    Vec<float> power;
    std::memcpy(&power, &bits, sizeof power);
    p = x > 88.7f ? splat(std::numeric_limits<float>::infinity()) : p * power;
    return x < -87.3f ? Vec<float>{} : p;
}

inline Vec<double> exponential(Vec<double> x) {
    for (int i = 0; i < Lanes<double>::count; i++) x[i] = std::exp(x[i]);
    return x;
}

// ---- products of HB heads of one query with the rows of its keys ----------------------------------------------------
//
// Scores lie as [keys][HB]. Rows are padded to whole vectors, keys to whole steps of `scores`.

template <typename T, int HB>
constexpr int keys_per_step() {
    return Lanes<T>::count / HB;
}

constexpr int AHEAD = 8;  // keys that are fetched ahead

// out[i][head] = scale * <q[head], rows[keys[i]]>, with `fill` after the last key.
template <typename T, int HB>
void scores(const T* q, const T* rows, int64_t stride, int64_t width, const int32_t* keys, int64_t n, T scale, T fill, T* out) {
    constexpr int W = Lanes<T>::count, KB = keys_per_step<T, HB>();
    for (int64_t i = 0; i < n; i += KB) {
        const T* row[KB];
        for (int j = 0; j < KB; j++) {
            row[j] = rows + stride * keys[std::min(i + j, n - 1)];
            __builtin_prefetch(rows + stride * keys[std::min(i + j + AHEAD, n - 1)]);
        }
        Vec<T> acc[W] = {};
        for (int64_t d = 0; d < width; d += W) {
            Vec<T> x[HB];
            for (int head = 0; head < HB; head++) x[head] = load(q + head * width + d);
            for (int j = 0; j < KB; j++) {
                const Vec<T> y = load(row[j] + d);
                for (int head = 0; head < HB; head++) acc[j * HB + head] += x[head] * y;
            }
        }
        store(out + i * HB, scale * sums<T>(acc));
    }
    for (int64_t i = n; i % KB; i++) std::fill_n(out + i * HB, HB, fill);
}

// out[head][d] += sum_i p[i][head] * rows[keys[i]][d] for NV vectors of d.
template <typename T, int HB, int NV, bool ODD>
void add_rows(const T* p, const T* rows, int64_t stride, const int32_t* keys, int64_t n, T* out, int64_t width) {
    constexpr int W = Lanes<T>::count;
    constexpr int64_t RUN = 256;  // keys of one partial sum
    for (int64_t first = 0; first < n; first += RUN) {
        Vec<T> acc[HB][NV] = {};
        const int64_t last = std::min(n, first + RUN);
        for (int64_t i = first; i < last; i++) {
            const T* row = rows + stride * keys[i];
            __builtin_prefetch(rows + stride * keys[std::min(i + AHEAD, n - 1)]);
            Vec<T> y[NV];
            for (int k = 0; k < NV; k++) y[k] = ODD ? finite<T>(load(row + k * W)) : load(row + k * W);
            for (int head = 0; head < HB; head++)
                for (int k = 0; k < NV; k++) acc[head][k] += p[i * HB + head] * y[k];
        }
        for (int head = 0; head < HB; head++)
            for (int k = 0; k < NV; k++) {
                T* at = out + head * width + k * W;
                store(at, load(at) + acc[head][k]);
            }
    }
}

// rows[keys[i]][d] += sum_head p[i][head] * x[head][d] for NV vectors of d.
template <typename T, int HB, int NV>
void add_to_rows(const T* p, const T* x, int64_t width, const int32_t* keys, int64_t n, T* rows, int64_t stride) {
    constexpr int W = Lanes<T>::count;
    Vec<T> y[HB][NV];
    for (int head = 0; head < HB; head++)
        for (int k = 0; k < NV; k++) y[head][k] = load(x + head * width + k * W);
    for (int64_t i = 0; i < n; i++) {
        T* row = rows + stride * keys[i];
        __builtin_prefetch(rows + stride * keys[std::min(i + AHEAD, n - 1)], 1);
        for (int k = 0; k < NV; k++) {
            Vec<T> sum = load(row + k * W);
            for (int head = 0; head < HB; head++) sum += p[i * HB + head] * y[head][k];
            store(row + k * W, sum);
        }
    }
}

// Calls fn(std::integral_constant<int, NV>, d) for pieces of 4, 2 and 1 vectors that cover `width`.
template <typename T, typename F>
inline void in_pieces(int64_t width, F fn) {
    constexpr int W = Lanes<T>::count;
    int64_t d = 0;
    for (; width - d >= 4 * W; d += 4 * W) fn(std::integral_constant<int, 4>(), d);
    for (; width - d >= 2 * W; d += 2 * W) fn(std::integral_constant<int, 2>(), d);
    for (; d < width; d += W) fn(std::integral_constant<int, 1>(), d);
}

template <typename T, int HB>
void sum_rows(bool odd, const T* p, const T* rows, int64_t stride, const int32_t* keys, int64_t n, T* out, int64_t width) {
    std::fill_n(out, HB * width, T(0));
    in_pieces<T>(width, [&](auto nv, int64_t d) {
        if (odd)
            add_rows<T, HB, decltype(nv)::value, true>(p, rows + d, stride, keys, n, out + d, width);
        else
            add_rows<T, HB, decltype(nv)::value, false>(p, rows + d, stride, keys, n, out + d, width);
    });
}

template <typename T, int HB>
void spread_rows(const T* p, const T* x, int64_t width, const int32_t* keys, int64_t n, T* rows, int64_t stride) {
    in_pieces<T>(width, [&](auto nv, int64_t d) {
        add_to_rows<T, HB, decltype(nv)::value>(p, x + d, width, keys, n, rows + d, stride);
    });
}

// Reduces lane i % HB of a vector: f over the lanes of each head.
template <typename T, int HB, typename F>
inline void by_head(Vec<T> v, T* out, F f) {
    for (int head = 0; head < HB; head++) out[head] = v[head];
    for (int i = HB; i < Lanes<T>::count; i++) out[i % HB] = f(out[i % HB], v[i]);
}

template <typename T, int HB>
inline Vec<T> repeated(const T* x) {
    Vec<T> v;
    for (int i = 0; i < Lanes<T>::count; i++) v[i] = x[i % HB];
    return v;
}

template <typename T>
inline T most_of(T a, T b) {
    return (a > b || a != a) ? a : b;
}

// ---- arguments ------------------------------------------------------------------------------------------------------

// Filled by selection_cpu_core.py: the same order there.
struct Arguments {
    int64_t batch, queries, groups, heads, keys, key_width, value_width;  // widths of whole vectors
    int64_t key_columns, value_columns;                                   // columns that outputs have
    int64_t entries, pairs, wide;  // of a query; whether they are [start, end) or single keys; whether they are int64
    int64_t entry_strides[5];      // of b, s, g, entry, and from start to end
    int64_t k_strides[3], v_strides[3];  // of b, g, key
    int64_t threads, odd, parts;  // parts: of the queries of a group in the backward; 0 for the forward
    const void *q, *k, *v, *sink, *entries_at, *low, *high, *segments_q, *segments_k;
    void *o, *lse;
    const void *dout, *dlse, *row_lse, *total;
    void *dq, *dk, *dv;
    double scale;
};

constexpr int64_t ANY_SEGMENT = -(int64_t(1) << 31);
constexpr int64_t TASK = 16;  // queries of one task

// ---- the keys of a query ----------------------------------------------------------------------------------------------

// Lists the distinct keys of a query in ascending order.
class Selection {
  public:
    explicit Selection(const Arguments& a) : a(a), bits((a.keys + 63) / 64 + 1, 0), found() {}

    const std::vector<int32_t>& of(int64_t b, int64_t s, int64_t g) {
        const int64_t at = b * a.entry_strides[0] + s * a.entry_strides[1] + g * a.entry_strides[2];
        if (a.wide)
            mark(static_cast<const int64_t*>(a.entries_at) + at, s);
        else
            mark(static_cast<const int32_t*>(a.entries_at) + at, s);
        collect();
        if (a.segments_q) keep_segment(b, s);
        return found;
    }

  private:
    template <typename I>
    void mark(const I* entry, int64_t s) {
        const int64_t low = static_cast<const int64_t*>(a.low)[s], size = static_cast<const int64_t*>(a.high)[s] - low;
        first = a.keys, last = 0;
        for (int64_t i = 0; i < a.entries; i++, entry += a.entry_strides[3]) {
            const int64_t from = *entry;
            if (a.pairs) {
                const int64_t to = entry[a.entry_strides[4]];
                add(low + std::max<int64_t>(from, 0), low + std::min(to, size));
            } else if (from >= 0 && from < size) {
                add(low + from, low + from + 1);
            }
        }
    }

    void add(int64_t from, int64_t to) {
        if (from >= to) return;
        first = std::min(first, from), last = std::max(last, to);
        const int64_t begin = from >> 6, end = (to - 1) >> 6;
        const uint64_t head = ~uint64_t(0) << (from & 63), tail = ~uint64_t(0) >> (63 - ((to - 1) & 63));
        if (begin == end) {
            bits[begin] |= head & tail;
            return;
        }
        bits[begin] |= head;
        for (int64_t i = begin + 1; i < end; i++) bits[i] = ~uint64_t(0);
        bits[end] |= tail;
    }

    void collect() {
        found.clear();
        if (first >= last) return;
        for (int64_t i = first >> 6; i <= (last - 1) >> 6; i++) {
            for (uint64_t word = bits[i]; word; word &= word - 1) found.push_back(int32_t(i * 64 + __builtin_ctzll(word)));
            bits[i] = 0;
        }
    }

    void keep_segment(int64_t b, int64_t s) {
        const int64_t own = static_cast<const int64_t*>(a.segments_q)[b * a.queries + s];
        const int64_t* ids = static_cast<const int64_t*>(a.segments_k) + b * a.keys;
        auto other = [&](int32_t key) { return ids[key] != own && ids[key] != ANY_SEGMENT; };
        found.erase(std::remove_if(found.begin(), found.end(), other), found.end());
    }

    const Arguments& a;
    std::vector<uint64_t> bits;
    std::vector<int32_t> found;
    int64_t first = 0, last = 0;
};

// ---- one query --------------------------------------------------------------------------------------------------------

// Buffers and steps of one thread, for HB heads at a time.
template <typename T, int HB>
class Worker {
    static constexpr int W = Lanes<T>::count, KB = keys_per_step<T, HB>();

  public:
    explicit Worker(const Arguments& a)
        : a(a),
          selection(a),
          x(HB * a.key_width),
          up(HB * a.value_width),
          result(HB * std::max(a.key_width, a.value_width)),
          spread(a.value_width) {}

    void forward(int64_t b, int64_t s, int64_t g) {
        const std::vector<int32_t>& keys = selection.of(b, s, g);
        const int64_t n = keys.size();
        const T *k = rows(a.k, a.k_strides, b, g), *v = rows(a.v, a.v_strides, b, g);
        const int64_t row = ((b * a.queries + s) * a.groups + g) * a.heads;
        T *o = static_cast<T*>(a.o) + row * a.value_columns, *lse = static_cast<T*>(a.lse) + row;
        if (n == 0) {
            std::fill_n(o, a.heads * a.value_columns, T(0));
            std::fill_n(lse, a.heads, -std::numeric_limits<T>::infinity());
            return;
        }
        room(n);
        if (a.odd) collect_odd(v, keys);
        for (int64_t head = 0; head < a.heads; head += HB) {
            const int count = int(std::min<int64_t>(HB, a.heads - head));
            take(x.data(), static_cast<const T*>(a.q) + (row + head) * a.key_columns, count, a.key_columns, a.key_width);
            T most[HB], total[HB];
            softmax(k, keys, most, total);
            sum_rows<T, HB>(a.odd, p.data(), v, a.v_strides[2], keys.data(), n, result.data(), a.value_width);
            for (int i = 0; i < count; i++) {
                const T log_sum = most[i] + std::log(total[i]);
                T sum = total[i];
                if (a.sink) sum += std::exp(static_cast<const T*>(a.sink)[g * a.heads + head + i] - most[i]);
                const T weight = log_sum == -std::numeric_limits<T>::infinity() ? T(0) : 1 / sum;
                lse[head + i] = log_sum;
                T* to = o + (head + i) * a.value_columns;
                for (int64_t d = 0; d < a.value_columns; d++) to[d] = result[i * a.value_width + d] * weight;
                for (int64_t d = 0; a.odd && d < a.value_columns; d++) to[d] += spread[d];
            }
        }
    }

    // Adds this query's part of dk and dv to the rows of grad_k and grad_v.
    void backward(int64_t b, int64_t s, int64_t g, T* grad_k, T* grad_v) {
        const std::vector<int32_t>& keys = selection.of(b, s, g);
        const int64_t n = keys.size();
        const T *k = rows(a.k, a.k_strides, b, g), *v = rows(a.v, a.v_strides, b, g);
        const int64_t row = ((b * a.queries + s) * a.groups + g) * a.heads;
        T* dq = static_cast<T*>(a.dq) + row * a.key_columns;
        if (n == 0) {
            std::fill_n(dq, a.heads * a.key_columns, T(0));
            return;
        }
        room(n);
        if (a.odd) std::fill(spread.begin(), spread.end(), T(0));
        for (int64_t head = 0; head < a.heads; head += HB) {
            const int count = int(std::min<int64_t>(HB, a.heads - head));
            const int64_t at = row + head;
            take(x.data(), static_cast<const T*>(a.q) + at * a.key_columns, count, a.key_columns, a.key_width);
            take(up.data(), static_cast<const T*>(a.dout) + at * a.value_columns, count, a.value_columns, a.value_width);
            weights(k, v, keys, at, count);
            sum_rows<T, HB>(a.odd, grad.data(), k, a.k_strides[2], keys.data(), n, result.data(), a.key_width);
            for (int i = 0; i < count; i++)
                for (int64_t d = 0; d < a.key_columns; d++)
                    dq[(head + i) * a.key_columns + d] = T(a.scale) * result[i * a.key_width + d];
            if (a.odd) separate_odd();
            spread_rows<T, HB>(grad.data(), x.data(), a.key_width, keys.data(), n, grad_k, a.key_width);
            spread_rows<T, HB>(p.data(), up.data(), a.value_width, keys.data(), n, grad_v, a.value_width);
        }
        if (a.odd)
            for (int32_t key : keys)
                for (int64_t d = 0; d < a.value_width; d++) grad_v[key * a.value_width + d] += spread[d];
    }

  private:
    static const T* rows(const void* base, const int64_t* strides, int64_t b, int64_t g) {
        return static_cast<const T*>(base) + b * strides[0] + g * strides[1];
    }

    void room(int64_t n) {
        const size_t size = (n + KB - 1) / KB * W;
        if (p.size() < size) p.resize(size), grad.resize(size);
    }

    // Copies `count` rows, padded with zeros to HB rows of whole vectors.
    static void take(T* to, const T* from, int count, int64_t columns, int64_t width) {
        std::fill_n(to, HB * width, T(0));
        for (int i = 0; i < count; i++) std::copy_n(from + i * columns, columns, to + i * width);
    }

    // Sets p to exp(scores - most), and returns most (0 where all scores are -inf) and the sum of p.
    void softmax(const T* k, const std::vector<int32_t>& keys, T* most, T* total) {
        const int64_t n = keys.size();
        constexpr T none = -std::numeric_limits<T>::infinity();
        scores<T, HB>(x.data(), k, a.k_strides[2], a.key_width, keys.data(), n, T(a.scale), none, p.data());
        Vec<T> top = splat(none), sum = {};
        for (int64_t i = 0; i < n * HB; i += W) top = larger<T>(top, load(p.data() + i));
        by_head<T, HB>(top, most, most_of<T>);
        for (int i = 0; i < HB; i++) most[i] = most[i] == none ? T(0) : most[i];
        const Vec<T> shift = repeated<T, HB>(most);
        for (int64_t i = 0; i < n * HB; i += W) {
            const Vec<T> e = exponential(load(p.data() + i) - shift);
            store(p.data() + i, e);
            sum += e;
        }
        by_head<T, HB>(sum, total, [](T a, T b) { return a + b; });
    }

    // Sets p to the probabilities and grad to the gradient of the scores.
    void weights(const T* k, const T* v, const std::vector<int32_t>& keys, int64_t at, int count) {
        const int64_t n = keys.size();
        constexpr T none = -std::numeric_limits<T>::infinity();
        scores<T, HB>(x.data(), k, a.k_strides[2], a.key_width, keys.data(), n, T(a.scale), none, p.data());
        scores<T, HB>(up.data(), v, a.v_strides[2], a.value_width, keys.data(), n, T(1), T(0), grad.data());
        T total[HB] = {}, lse[HB] = {}, dlse[HB] = {}, sum[HB];
        std::copy_n(static_cast<const T*>(a.total) + at, count, total);
        std::copy_n(static_cast<const T*>(a.row_lse) + at, count, lse);
        if (a.dlse) std::copy_n(static_cast<const T*>(a.dlse) + at, count, dlse);
        const Vec<T> shift = repeated<T, HB>(total), shift_lse = repeated<T, HB>(lse), factor = repeated<T, HB>(dlse);
        Vec<T> delta = {};
        if (a.dlse) second.resize(p.size());
        for (int64_t i = 0; i < n * HB; i += W) {
            const Vec<T> t = load(p.data() + i), e = exponential(t - shift);
            if (a.dlse) store(second.data() + i, factor * exponential(t - shift_lse));
            store(p.data() + i, e);
            delta += e * load(grad.data() + i);
        }
        by_head<T, HB>(delta, sum, [](T a, T b) { return a + b; });
        delta = repeated<T, HB>(sum);
        for (int64_t i = 0; i < n * HB; i += W) {
            Vec<T> e = load(p.data() + i) * (load(grad.data() + i) - delta);
            if (a.dlse) e += load(second.data() + i);
            store(grad.data() + i, e);
        }
        // Rows that only fill up the heads may be NaN here.
        for (int64_t i = 0; a.odd && i < n * HB; i++)
            if (i % HB >= count) p[i] = grad[i] = T(0);
    }

    // Sets spread to the sum of the NaN and inf in the rows of v that the query selects, 0 elsewhere.
    void collect_odd(const T* v, const std::vector<int32_t>& keys) {
        std::fill(spread.begin(), spread.end(), T(0));
        for (int32_t key : keys) add_odd(v + key * a.v_strides[2]);
    }

    void add_odd(const T* row) {
        for (int64_t d = 0; d < a.value_width; d++)
            if (!std::isfinite(row[d])) spread[d] += row[d];
    }

    // Moves the NaN and inf of up to spread, and puts 0 for those of x.
    void separate_odd() {
        for (int i = 0; i < HB; i++) add_odd(up.data() + i * a.value_width);
        for (T& value : up) value = std::isfinite(value) ? value : T(0);
        for (T& value : x) value = std::isfinite(value) ? value : T(0);
    }

    const Arguments& a;
    Selection selection;
    std::vector<T> x, up, p, grad, second, result, spread;
};

// ---- all queries --------------------------------------------------------------------------------------------------------

// Runs fn(worker, task) for each task on the threads. Returns 0, or 1 where memory ran out.
template <typename T, int HB, typename F>
int each(const Arguments& a, int64_t tasks, F fn) {
    int failed = 0;
#pragma omp parallel num_threads(int(std::min(a.threads, tasks))) reduction(| : failed)
    {
        try {
            Worker<T, HB> worker(a);
#pragma omp for schedule(dynamic) nowait
            for (int64_t task = 0; task < tasks; task++) {
                try {
                    if (!failed) fn(worker, task);
                } catch (const std::bad_alloc&) {
                    failed = 1;
                }
            }
        } catch (const std::bad_alloc&) {
            failed = 1;
        }
    }
    return failed;
}

template <typename T, int HB>
int run_forward(const Arguments& a) {
    const int64_t pieces = (a.queries + TASK - 1) / TASK;
    return each<T, HB>(a, a.batch * a.groups * pieces, [&](Worker<T, HB>& worker, int64_t task) {
        const int64_t first = task % pieces * TASK, b = task / pieces / a.groups, g = task / pieces % a.groups;
        for (int64_t s = first; s < std::min(a.queries, first + TASK); s++) worker.forward(b, s, g);
    });
}

template <typename T>
inline void add_row(T* to, const T* from, int64_t width) {
    for (int64_t d = 0; d < width; d += Lanes<T>::count) store(to + d, load(to + d) + load(from + d));
}

// The queries of a group are cut into a.parts parts, whatever the number of threads. Each part sums dk and dv by itself,
// and the parts are added in order.
template <typename T, int HB>
int run_backward(const Arguments& a) {
    const int64_t width = a.key_width + a.value_width, size = a.keys * width, groups = a.batch * a.groups;
    const int64_t together = std::min(groups, std::max<int64_t>(1, a.threads / a.parts));
    std::unique_ptr<T[]> sums(new T[together * a.parts * size]);
    int failed = 0;
    for (int64_t first = 0; first < groups; first += together) {
        const int64_t count = std::min(together, groups - first);
        failed |= each<T, HB>(a, count * a.parts, [&](Worker<T, HB>& worker, int64_t task) {
            const int64_t at = first + task / a.parts, part = task % a.parts;
            T* sum = sums.get() + task * size;
            std::fill_n(sum, size, T(0));
            for (int64_t s = a.queries * part / a.parts; s < a.queries * (part + 1) / a.parts; s++)
                worker.backward(at / a.groups, s, at % a.groups, sum, sum + a.keys * a.key_width);
        });
#pragma omp parallel for num_threads(int(a.threads)) schedule(static)
        for (int64_t row = 0; row < count * a.keys; row++) {
            const int64_t at = row / a.keys, key = row % a.keys;
            T *part = sums.get() + at * a.parts * size, *values = part + a.keys * a.key_width;
            for (int64_t i = 1; i < a.parts; i++) {
                add_row(part + key * a.key_width, part + i * size + key * a.key_width, a.key_width);
                add_row(values + key * a.value_width, values + i * size + key * a.value_width, a.value_width);
            }
            const int64_t to = (first + at) * a.keys + key;
            T *dk = static_cast<T*>(a.dk) + to * a.key_columns, *dv = static_cast<T*>(a.dv) + to * a.value_columns;
            for (int64_t d = 0; d < a.key_columns; d++) dk[d] = T(a.scale) * part[key * a.key_width + d];
            for (int64_t d = 0; d < a.value_columns; d++) dv[d] = values[key * a.value_width + d];
        }
    }
    return failed;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Returns the columns of one vector: key_width and value_width are multiples of them.
EXPORT int lanes() { return Lanes<SCALAR>::count; }

// Returns 0, or 1 where memory ran out.
EXPORT int selection(const Arguments* a) {
    try {
        return a->parts ? run_backward<SCALAR, HEADS>(*a) : run_forward<SCALAR, HEADS>(*a);
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
"""
