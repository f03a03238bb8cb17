# SPDX-License-Identifier: Apache-2.0
"""C++ of selection attention on a CPU: vectors, and products of a query's heads with the rows of its keys.

It needs the vector extensions of GCC or Clang, and no header of PyTorch. A product reads the rows of the selected keys
where they lie; nothing is gathered.
"""

PRODUCTS = r"""
// SCALAR is float or double; HEADS, 1, 2 or 4, is the number of heads of a query that are multiplied at once.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>
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
struct Lanes {
    typedef std::conditional_t<sizeof(T) == 4, int32_t, int64_t> Int;
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
    return __builtin_shufflevector(a, b, low_index(I, bit, n)...) +
           __builtin_shufflevector(a, b, high_index(I, bit, n)...);
#else
    typedef typename Lanes<T>::ints Ints;
    return __builtin_shuffle(a, b, Ints{low_index(I, bit, n)...}) +
           __builtin_shuffle(a, b, Ints{high_index(I, bit, n)...});
#endif
}

// Returns the vector whose lane i is the sum of the lanes of v[i]. Overwrites v.
template <typename T, int bit = 1>
inline Vec<T> sums(Vec<T>* v) {
    constexpr int n = Lanes<T>::count;
    if constexpr (bit < n) {
        constexpr auto lanes = std::make_integer_sequence<int, n>();
        for (int i = 0; i < n / bit; i += 2) v[i / 2] = merged<T, bit>(v[i], v[i + 1], lanes);
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

// ---- products of HB heads of one query with the rows of its keys --------------------------------------------------
//
// Scores lie as [keys][HB]. Rows are padded to whole vectors, keys to whole steps of `scores`.

template <typename T, int HB>
constexpr int keys_per_step() {
    return Lanes<T>::count / HB;
}

constexpr int AHEAD = 8;                         // keys that are fetched ahead
constexpr int PADDING = AHEAD + VECTOR_BYTES / 4;  // keys that may be read after the last

// out[i][head] = scale * <q[head], rows[keys[i]]>, with `fill` after the last key.
template <typename T, int HB>
void scores(const T* q, const T* rows, int64_t stride, int64_t width, const int32_t* keys, int64_t n, T scale, T fill,
            T* out) {
    constexpr int W = Lanes<T>::count, KB = keys_per_step<T, HB>();
    for (int64_t i = 0; i < n; i += KB) {
        const T* row[KB];
        for (int j = 0; j < KB; j++) {
            row[j] = rows + stride * keys[i + j];
            __builtin_prefetch(rows + stride * keys[i + j + AHEAD]);
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
            __builtin_prefetch(rows + stride * keys[i + AHEAD]);
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
        __builtin_prefetch(rows + stride * keys[i + AHEAD], 1);
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
void sum_rows(bool odd, const T* p, const T* rows, int64_t stride, const int32_t* keys, int64_t n, T* out,
              int64_t width) {
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

"""
