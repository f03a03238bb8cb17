# SPDX-License-Identifier: Apache-2.0
"""C++ of selection attention on a CPU: the keys of a query, one query's forward and backward, the loop over queries.

It follows :data:`mhc_inductor.kernels.cpu.selection_products.PRODUCTS`. SCALAR is float or double; HEADS, 1, 2 or 4, is the
number of heads of a query that are multiplied at once. Every sum has a fixed order that does not depend on the number
of threads.
"""

ATTENTION = r"""
// ---- arguments ----------------------------------------------------------------------------------------------------

// The order of _Arguments in selection_core.py.
struct Arguments {
    int64_t batch, queries, groups, heads, keys, key_width, value_width;  // widths of whole vectors
    int64_t key_columns, value_columns;                                   // columns that outputs have
    int64_t entries, pairs, wide;  // of a query; whether they are [start, end) or single keys; whether they are int64
    int64_t entry_strides[5];      // of b, s, g, entry, and from start to end
    int64_t k_strides[3], v_strides[3];  // of b, g, key
    int64_t threads, odd, parts;  // odd: NaN or inf in the backward's inputs; parts of the queries, 0 for the forward
    const void *q, *k, *v, *sink, *entries_at, *low, *high, *segments_q, *segments_k;
    void *o, *lse;
    const void *dout, *dlse, *row_lse, *total;
    void *dq, *dk, *dv;
    double scale;
};

constexpr int64_t ANY_SEGMENT = -(int64_t(1) << 31);
constexpr int64_t TASK = 16;  // queries of one task

// ---- the keys of a query ------------------------------------------------------------------------------------------

// The distinct keys of a query in ascending order, followed by AHEAD + W copies of the last.
struct Keys {
    const int32_t* at;
    int64_t count;
};

// Lists the keys of one query after the other: at once where the entries ascend, else through a bit for each key.
class Selection {
  public:
    explicit Selection(const Arguments& a) : a(a), bits((a.keys + 63) / 64, 0), found(a.keys + PADDING) {}

    Keys of(int64_t b, int64_t s, int64_t g) {
        const int64_t at = b * a.entry_strides[0] + s * a.entry_strides[1] + g * a.entry_strides[2];
        count = 0;
        if (a.wide)
            list(static_cast<const int64_t*>(a.entries_at) + at, s);
        else
            list(static_cast<const int32_t*>(a.entries_at) + at, s);
        if (a.segments_q) keep_segment(b, s);
        if (count) std::fill_n(found.data() + count, PADDING, found[count - 1]);
        return {found.data(), count};
    }

  private:
    // Calls fn(from, to), which returns whether to go on, for each entry that selects keys. Returns whether all went.
    template <typename I, typename F>
    bool entries(const I* entry, int64_t s, F fn) {
        const int64_t low = static_cast<const int64_t*>(a.low)[s], size = static_cast<const int64_t*>(a.high)[s] - low;
        const int64_t step = a.entry_strides[3], pair = a.entry_strides[4], pairs = a.pairs, count = a.entries;
        for (int64_t i = 0; i < count; i++, entry += step) {
            const int64_t start = *entry, from = std::max<int64_t>(start, 0);
            const int64_t to = pairs ? std::min<int64_t>(entry[pair], size) : start < size ? start + 1 : 0;
            if (from < to && !fn(low + from, low + to)) return false;
        }
        return true;
    }

    template <typename I>
    void list(const I* entry, int64_t s) {
        int64_t end = 0;
        int32_t* at = found.data();
        const bool ascending = entries(entry, s, [&](int64_t from, int64_t to) {
            if (from < end) return false;
            end = to;
            do *at++ = int32_t(from);
            while (++from < to);
            return true;
        });
        count = at - found.data();
        if (ascending) return;
        int64_t first = a.keys, last = 0;
        entries(entry, s, [&](int64_t from, int64_t to) {
            first = std::min(first, from), last = std::max(last, to);
            mark(from, to);
            return true;
        });
        collect(first >> 6, (last + 63) >> 6);
    }

    void mark(int64_t from, int64_t to) {
        const int64_t begin = from >> 6, end = (to - 1) >> 6;
        const uint64_t head = ~uint64_t(0) << (from & 63), tail = ~uint64_t(0) >> (63 - ((to - 1) & 63));
        if (begin == end) {
            bits[begin] |= head & tail;
            return;
        }
        bits[begin] |= head;
        std::fill(bits.begin() + begin + 1, bits.begin() + end, ~uint64_t(0));
        bits[end] |= tail;
    }

    void collect(int64_t begin, int64_t end) {
        int32_t* to = found.data();
        for (int64_t i = begin; i < end; i++) {
            for (uint64_t word = bits[i]; word; word &= word - 1) *to++ = int32_t(i * 64 + __builtin_ctzll(word));
            bits[i] = 0;
        }
        count = to - found.data();
    }

    void keep_segment(int64_t b, int64_t s) {
        const int64_t own = static_cast<const int64_t*>(a.segments_q)[b * a.queries + s];
        const int64_t* ids = static_cast<const int64_t*>(a.segments_k) + b * a.keys;
        auto other = [&](int32_t key) { return ids[key] != own && ids[key] != ANY_SEGMENT; };
        count = std::remove_if(found.begin(), found.begin() + count, other) - found.begin();
    }

    const Arguments& a;
    std::vector<uint64_t> bits;
    std::vector<int32_t> found;
    int64_t count = 0;
};

// ---- sums of dk and dv --------------------------------------------------------------------------------------------

constexpr int64_t BLOCK = 64;  // keys whose sums start together

// The sums of one part of the queries, in rows of whole vectors. Only blocks of keys that a query selects are started.
template <typename T>
struct Sums {
    const Arguments& a;
    T *k, *v;
    char* started;  // of each block

    void start(Keys keys) const {
        for (int64_t i = 0, last = -1; i < keys.count; i++) {
            const int64_t block = keys.at[i] / BLOCK;
            if (block == last || started[last = block]) continue;
            started[block] = 1;
            const int64_t first = block * BLOCK, count = std::min(BLOCK, a.keys - first);
            std::fill_n(k + first * a.key_width, count * a.key_width, T(0));
            std::fill_n(v + first * a.value_width, count * a.value_width, T(0));
        }
    }
};

// ---- one query ----------------------------------------------------------------------------------------------------

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
        const Keys keys = selection.of(b, s, g);
        const int64_t n = keys.count;
        const T *k = rows(a.k, a.k_strides, b, g), *v = rows(a.v, a.v_strides, b, g);
        const int64_t row = ((b * a.queries + s) * a.groups + g) * a.heads;
        T *o = static_cast<T*>(a.o) + row * a.value_columns, *lse = static_cast<T*>(a.lse) + row;
        if (n == 0) {
            std::fill_n(o, a.heads * a.value_columns, T(0));
            std::fill_n(lse, a.heads, -std::numeric_limits<T>::infinity());
            return;
        }
        room(n);
        bool collected = false;
        for (int64_t head = 0; head < a.heads; head += HB) {
            const int count = int(std::min<int64_t>(HB, a.heads - head));
            const T* query = static_cast<const T*>(a.q) + (row + head) * a.key_columns;
            take(x.data(), query, count, a.key_columns, a.key_width);
            T most[HB], total[HB];
            softmax(k, keys, most, total);
            sum_rows<T, HB>(false, p.data(), v, a.v_strides[2], keys.at, n, result.data(), a.value_width);
            // A NaN or inf in a value always shows, whatever its weight.
            const T *first = result.data(), *last = first + count * a.value_width;
            const bool odd = !std::all_of(first, last, [](T value) { return value - value == 0; });
            if (odd) sum_rows<T, HB>(true, p.data(), v, a.v_strides[2], keys.at, n, result.data(), a.value_width);
            if (odd && !collected) collect_odd(v, keys), collected = true;
            for (int i = 0; i < count; i++) {
                const T log_sum = most[i] + std::log(total[i]);
                T sum = total[i];
                if (a.sink) sum += std::exp(static_cast<const T*>(a.sink)[g * a.heads + head + i] - most[i]);
                const T weight = log_sum == -std::numeric_limits<T>::infinity() ? T(0) : 1 / sum;
                lse[head + i] = log_sum;
                T* to = o + (head + i) * a.value_columns;
                for (int64_t d = 0; d < a.value_columns; d++) to[d] = result[i * a.value_width + d] * weight;
                for (int64_t d = 0; odd && d < a.value_columns; d++) to[d] += spread[d];
            }
        }
    }

    // Writes dq, and adds this query's part of dk and dv to the sums.
    void backward(int64_t b, int64_t s, int64_t g, const Sums<T>& sums) {
        const Keys keys = selection.of(b, s, g);
        const int64_t n = keys.count;
        const T *k = rows(a.k, a.k_strides, b, g), *v = rows(a.v, a.v_strides, b, g);
        const int64_t row = ((b * a.queries + s) * a.groups + g) * a.heads;
        T* dq = static_cast<T*>(a.dq) + row * a.key_columns;
        if (n == 0) {
            std::fill_n(dq, a.heads * a.key_columns, T(0));
            return;
        }
        room(n);
        sums.start(keys);
        if (a.odd) std::fill(spread.begin(), spread.end(), T(0));
        for (int64_t head = 0; head < a.heads; head += HB) {
            const int count = int(std::min<int64_t>(HB, a.heads - head));
            const int64_t at = row + head;
            const T* query = static_cast<const T*>(a.q) + at * a.key_columns;
            const T* dout = static_cast<const T*>(a.dout) + at * a.value_columns;
            take(x.data(), query, count, a.key_columns, a.key_width);
            take(up.data(), dout, count, a.value_columns, a.value_width);
            weights(k, v, keys, at, count);
            sum_rows<T, HB>(a.odd, grad.data(), k, a.k_strides[2], keys.at, n, result.data(), a.key_width);
            for (int i = 0; i < count; i++)
                for (int64_t d = 0; d < a.key_columns; d++)
                    dq[(head + i) * a.key_columns + d] = T(a.scale) * result[i * a.key_width + d];
            if (a.odd) separate_odd();
            spread_rows<T, HB>(grad.data(), x.data(), a.key_width, keys.at, n, sums.k, a.key_width);
            spread_rows<T, HB>(p.data(), up.data(), a.value_width, keys.at, n, sums.v, a.value_width);
        }
        if (a.odd)
            for (int64_t i = 0; i < n; i++)
                for (int64_t d = 0; d < a.value_width; d++) sums.v[keys.at[i] * a.value_width + d] += spread[d];
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
    void softmax(const T* k, Keys keys, T* most, T* total) {
        const int64_t n = keys.count;
        constexpr T none = -std::numeric_limits<T>::infinity();
        scores<T, HB>(x.data(), k, a.k_strides[2], a.key_width, keys.at, n, T(a.scale), none, p.data());
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
    void weights(const T* k, const T* v, Keys keys, int64_t at, int count) {
        const int64_t n = keys.count;
        constexpr T none = -std::numeric_limits<T>::infinity();
        scores<T, HB>(x.data(), k, a.k_strides[2], a.key_width, keys.at, n, T(a.scale), none, p.data());
        scores<T, HB>(up.data(), v, a.v_strides[2], a.value_width, keys.at, n, T(1), T(0), grad.data());
        T total[HB] = {}, lse[HB] = {}, dlse[HB] = {}, sum[HB], whole[HB];
        std::copy_n(static_cast<const T*>(a.total) + at, count, total);
        std::copy_n(static_cast<const T*>(a.row_lse) + at, count, lse);
        if (a.dlse) std::copy_n(static_cast<const T*>(a.dlse) + at, count, dlse);
        const Vec<T> shift = repeated<T, HB>(total), shift_lse = repeated<T, HB>(lse), factor = repeated<T, HB>(dlse);
        Vec<T> delta = {}, added = {};
        if (a.dlse) second.resize(p.size());
        for (int64_t i = 0; i < n * HB; i += W) {
            const Vec<T> t = load(p.data() + i), e = exponential(t - shift);
            if (a.dlse) store(second.data() + i, factor * exponential(t - shift_lse));
            store(p.data() + i, e);
            delta += e * load(grad.data() + i);
            added += e;
        }
        by_head<T, HB>(delta, sum, [](T a, T b) { return a + b; });
        by_head<T, HB>(added, whole, [](T a, T b) { return a + b; });
        // A large total is rounded, and all p with it: what they add to is 1 where no sink takes a share.
        for (int i = 0; i < count; i++)
            if (total[i] == lse[i] && whole[i] > T(0)) sum[i] /= whole[i];
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
    void collect_odd(const T* v, Keys keys) {
        std::fill(spread.begin(), spread.end(), T(0));
        for (int64_t i = 0; i < keys.count; i++) add_odd(v + keys.at[i] * a.v_strides[2]);
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

// ---- all queries --------------------------------------------------------------------------------------------------

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
inline void add(T* to, const T* from, int64_t size) {
    for (int64_t d = 0; d < size; d += Lanes<T>::count) store(to + d, load(to + d) + load(from + d));
}

// Writes the columns of `count` rows of whole vectors, times `factor`; zeros where there are no rows.
template <typename T>
void write(T* to, const T* from, int64_t count, int64_t columns, int64_t width, T factor) {
    for (int64_t i = 0; i < count; i++, to += columns)
        for (int64_t d = 0; d < columns; d++) to[d] = from ? factor * from[i * width + d] : T(0);
}

// The queries of a group are cut into a.parts parts, whatever the number of threads. Each part sums dk and dv by
// itself, and the parts are added in order.
template <typename T, int HB>
int run_backward(const Arguments& a) {
    const int64_t size = a.keys * (a.key_width + a.value_width), blocks = (a.keys + BLOCK - 1) / BLOCK;
    const int64_t groups = a.batch * a.groups;
    const int64_t together = std::min(groups, (a.threads + a.parts - 1) / a.parts);
    std::unique_ptr<T[]> space(new T[together * a.parts * size]);
    std::vector<char> started(together * a.parts * blocks);
    auto sums = [&](int64_t task) {
        T* at = space.get() + task * size;
        return Sums<T>{a, at, at + a.keys * a.key_width, started.data() + task * blocks};
    };
    int failed = 0;
    for (int64_t first = 0; first < groups; first += together) {
        const int64_t count = std::min(together, groups - first);
        std::fill(started.begin(), started.end(), 0);
        failed |= each<T, HB>(a, count * a.parts, [&](Worker<T, HB>& worker, int64_t task) {
            const int64_t at = first + task / a.parts, part = task % a.parts;
            for (int64_t s = a.queries * part / a.parts; s < a.queries * (part + 1) / a.parts; s++)
                worker.backward(at / a.groups, s, at % a.groups, sums(task));
        });
#pragma omp parallel for num_threads(int(a.threads)) schedule(static)
        for (int64_t task = 0; task < count * blocks; task++) {
            const int64_t at = task / blocks, block = task % blocks, key = block * BLOCK;
            const int64_t rows = std::min(BLOCK, a.keys - key);
            T *k = nullptr, *v = nullptr;
            for (int64_t part = at * a.parts; part < (at + 1) * a.parts; part++) {
                const Sums<T> more = sums(part);
                if (!more.started[block]) continue;
                T *more_k = more.k + key * a.key_width, *more_v = more.v + key * a.value_width;
                if (k) add(k, more_k, rows * a.key_width), add(v, more_v, rows * a.value_width);
                if (!k) k = more_k, v = more_v;
            }
            const int64_t to = (first + at) * a.keys + key;
            write(static_cast<T*>(a.dk) + to * a.key_columns, k, rows, a.key_columns, a.key_width, T(a.scale));
            write(static_cast<T*>(a.dv) + to * a.value_columns, v, rows, a.value_columns, a.value_width, T(1));
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
    constexpr int together = std::min(HEADS, Lanes<SCALAR>::count);
    try {
        return a->parts ? run_backward<SCALAR, together>(*a) : run_forward<SCALAR, together>(*a);
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
"""
