// The kernels, written once for 16 lanes and compiled for vectors of WIDTH bytes, in a namespace of their own.
//
// Lane j adds the elements j, j + 16, j + 32, ..., whatever the width, and lanes are added in the same order.  Products are rounded
// before they are added (-ffp-contract=off).  So all variants return the same bits.

constexpr int LANES = 16, RUN = 4096;

template <class T> using Integer = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;

// N lanes: all of them, or those of one vector.
template <class T, int N = LANES>
struct Pack {
    static constexpr int SIZE = WIDTH / sizeof(T), PARTS = N / SIZE;
    typedef T Vector __attribute__((vector_size(WIDTH)));
    typedef T Stored __attribute__((vector_size(WIDTH), aligned(alignof(T)), may_alias));
    typedef Integer<T> Bits __attribute__((vector_size(WIDTH)));
    Vector part[PARTS];
};

#define EACH for (int k = 0; k < Pack<T, N>::PARTS; k++)
#define OPERATOR(OP)                                                                                                  \
    template <class T, int N> INLINE Pack<T, N> operator OP(Pack<T, N> a, const Pack<T, N> &b) {                      \
        EACH a.part[k] = a.part[k] OP b.part[k];                                                                      \
        return a;                                                                                                     \
    }
OPERATOR(+)
OPERATOR(-)
OPERATOR(*)

template <int N, class T> INLINE Pack<T, N> splat(T value) {
    Pack<T, N> all;
    EACH all.part[k] = value - typename Pack<T>::Vector{};
    return all;
}

template <int N, class T> INLINE Pack<T, N> load(const T *x) {
    Pack<T, N> v;
    EACH v.part[k] = *reinterpret_cast<const typename Pack<T>::Stored *>(x + k * Pack<T>::SIZE);
    return v;
}

template <class T, int N> INLINE Pack<T, N> lower(Pack<T, N> a, const Pack<T, N> &b) {
    EACH a.part[k] = b.part[k] < a.part[k] ? b.part[k] : a.part[k];
    return a;
}
template <class T, int N> INLINE Pack<T, N> higher(Pack<T, N> a, const Pack<T, N> &b) {
    EACH a.part[k] = b.part[k] > a.part[k] ? b.part[k] : a.part[k];
    return a;
}

// The bits of magnitudes: those of numbers without the sign.
template <class T> INLINE typename Pack<T>::Bits unsigned_bits(const typename Pack<T>::Vector &a) {
    using Bits = typename Pack<T>::Bits;
    return reinterpret_cast<Bits>(a) & ~(Bits{} + std::numeric_limits<Integer<T>>::min());
}
template <class T, int N> INLINE Pack<T, N> magnitude(Pack<T, N> a) {
    EACH a.part[k] = reinterpret_cast<typename Pack<T>::Vector>(unsigned_bits<T>(a.part[k]));
    return a;
}

// Add lanes to sums in double, from one of them on.
template <int N> INLINE void add_wide(Pack<double> &sums, const Pack<double, N> &a, int lane) {
    for (int k = 0; k < Pack<double, N>::PARTS; k++) sums.part[lane / Pack<double>::SIZE + k] += a.part[k];
}
template <int N> INLINE void add_wide(Pack<double> &sums, const Pack<float, N> &a, int lane) {
    typedef float Half __attribute__((vector_size(WIDTH / 2)));
    for (int k = 0; k < Pack<float, N>::PARTS; k++) {
        Half half[2];
        std::memcpy(half, &a.part[k], WIDTH);
        const int first = lane / Pack<double>::SIZE + 2 * k;
        sums.part[first] += WIDEN(half[0]);
        sums.part[first + 1] += WIDEN(half[1]);
    }
}

INLINE double total(const Pack<double> &pack) {
    double lanes[LANES];
    std::memcpy(lanes, &pack, sizeof lanes);
    for (int width = LANES / 2; width; width /= 2)
        for (int j = 0; j < width; j++) lanes[j] += lanes[j + width];
    return lanes[0];
}
template <class T> INLINE T lowest(T *lanes, T sign) {
    for (int width = LANES / 2; width; width /= 2)
        for (int j = 0; j < width; j++) lanes[j] = sign * lanes[j + width] < sign * lanes[j] ? lanes[j + width] : lanes[j];
    return lanes[0];
}

// ---- numbers in memory, by their position ------------------------------------------------------------------------------

template <class T> struct Plain {
    using Number = T;
    const T *x;
    template <int N> INLINE Pack<T, N> at(int64_t i) const { return load<N>(x + i); }
    INLINE T one(int64_t i) const { return x[i]; }
    INLINE void prefetch(int64_t i) const {
        for (size_t j = 0; j < LANES; j += 64 / sizeof(T)) __builtin_prefetch(x + i + j + 8192 / sizeof(T));
    }
};

struct Bfloat16 {
    using Number = float;
    const uint16_t *x;
    INLINE float one(int64_t i) const { return widened(x[i]); }
};

// The difference is rounded as that of two tensors, but is not written to memory.
template <class S> struct Difference {
    using Number = typename S::Number;
    S x, y;
    template <int N> INLINE Pack<Number, N> at(int64_t i) const { return x.template at<N>(i) - y.template at<N>(i); }
    INLINE Number one(int64_t i) const { return x.one(i) - y.one(i); }
    INLINE void prefetch(int64_t i) const { x.prefetch(i), y.prefetch(i); }
};

// ---- statistics of a run -----------------------------------------------------------------------------------------------

// The sums of the numbers, their magnitudes, and of the powers of their deviations.
template <class T, int N> struct Powers { Pack<T, N> squares, l1, s1, s2, s3, s4; };

template <class T, int WANTED, int N = LANES> struct Sums : Powers<T, N> {
    INLINE void clear() {  // a constructor would not be compiled for the processor
        this->squares = splat<N>(T(0));
        if constexpr (WANTED != 0) this->l1 = this->s1 = this->s2 = this->squares;
        if constexpr ((WANTED & HIGHER) != 0) this->s3 = this->s4 = this->squares;
    }

    INLINE void add(const Pack<T, N> &v, const Pack<T, N> &d) {
        this->squares = this->squares + v * v;
        if constexpr (WANTED != 0) {
            const Pack<T, N> dd = d * d;
            this->l1 = this->l1 + magnitude(v), this->s1 = this->s1 + d, this->s2 = this->s2 + dd;
            if constexpr ((WANTED & HIGHER) != 0) this->s3 = this->s3 + dd * d, this->s4 = this->s4 + dd * dd;
        }
    }

    // Add these sums to others in double, from a lane on.
    INLINE void add_to(Powers<double, LANES> &all, int lane) const {
        add_wide(all.squares, this->squares, lane);
        if constexpr (WANTED != 0)
            add_wide(all.l1, this->l1, lane), add_wide(all.s1, this->s1, lane), add_wide(all.s2, this->s2, lane);
        if constexpr ((WANTED & HIGHER) != 0) add_wide(all.s3, this->s3, lane), add_wide(all.s4, this->s4, lane);
    }
};

template <class T, int N> struct Extremes {
    Pack<T, N> low, high;
    typename Pack<T>::Bits zeros[Pack<T, N>::PARTS];

    INLINE void clear() {
        low = splat<N>(std::numeric_limits<T>::infinity()), high = splat<N>(-std::numeric_limits<T>::infinity());
        for (auto &part : zeros) part = typename Pack<T>::Bits{};
    }

    INLINE void add(const Pack<T, N> &v, const Pack<T, N> &extreme) {
        low = lower(low, extreme), high = higher(high, extreme);
        EACH zeros[k] -= unsigned_bits<T>(v.part[k]) == typename Pack<T>::Bits{};  // a comparison gives -1
    }
};

// Fewer than 16 numbers; the other lanes change no sum and no extreme, and are zeros.
template <class T> struct Rest { T v[LANES], d[LANES], extreme[LANES]; };
template <class S, class T>
__attribute__((noinline)) void load_rest(const S &x, int64_t first, int n, T shift, Rest<T> &rest) {
    for (int j = 0; j < LANES; j++) {
        rest.v[j] = j < n ? x.one(first + j) : 0;
        rest.d[j] = j < n ? rest.v[j] - shift : 0;
        rest.extreme[j] = rest.v[j < n ? j : 0];
    }
}

// Read n numbers, at most RUN of them, once.  Deviations are from `shift`.  Return whether the sums of T are good enough.
template <int WANTED, class S>
__attribute__((noinline)) bool read_run(const S &x, int64_t first, int n, double center, Record &row) {
    using T = typename S::Number;
    constexpr int CHAINS = WANTED ? 1 : 2;  // independent sums: an addition waits for the one before it
    constexpr int BLOCK = 64 * CHAINS * LANES;
    constexpr int N = WANTED ? Pack<T>::SIZE : LANES;  // lanes of which all sums and extremes fit into the registers
    const T shift = static_cast<T>(center);
    const Pack<T, N> shifts = splat<N>(shift);
    Extremes<T, N> found[LANES / N];
    for (auto &some : found) some.clear();
    Sums<double, WANTED> all;
    all.clear();
    const int whole = n - n % LANES;
    Rest<T> rest;
    if (whole < n) load_rest(x, first + whole, n - whole, shift, rest);
    for (int begin = 0; begin < n; begin += BLOCK) {
        const int end = whole - begin < BLOCK ? whole : begin + BLOCK;
        for (int lane = 0; lane < LANES; lane += N) {
            Sums<T, WANTED, N> sums[CHAINS];
            for (auto &chain : sums) chain.clear();
            Extremes<T, N> extremes = found[lane / N];
            int i = begin;
            for (; i + CHAINS * LANES <= end; i += CHAINS * LANES)
                for (int c = 0; c < CHAINS; c++) {
                    const int64_t at = first + i + c * LANES;
                    if (WANTED && lane == 0) x.prefetch(at);  // the processor does it for few instructions
                    const Pack<T, N> v = x.template at<N>(at + lane);
                    sums[c].add(v, v - shifts);
                    if constexpr (WANTED != 0) extremes.add(v, v);
                }
            if (i < end) {  // half of the chains
                const Pack<T, N> v = x.template at<N>(first + i + lane);
                sums[0].add(v, v - shifts);
                i += LANES;
            }
            if (i == whole && whole < n && i < begin + BLOCK) {
                const Pack<T, N> v = load<N>(rest.v + lane);
                sums[0].add(v, load<N>(rest.d + lane));
                if constexpr (WANTED != 0) extremes.add(v, load<N>(rest.extreme + lane));
            }
            for (auto &chain : sums) chain.add_to(all, lane);
            found[lane / N] = extremes;
        }
    }
    row.n = n, row.sumsq = total(all.squares);
    double s2 = 0;
    if constexpr (WANTED != 0) {
        T lows[LANES], highs[LANES];
        Integer<T> zeros[LANES];
        for (int lane = 0; lane < LANES; lane += N) {
            const Extremes<T, N> &some = found[lane / N];
            std::memcpy(lows + lane, &some.low, sizeof some.low), std::memcpy(highs + lane, &some.high, sizeof some.high);
            std::memcpy(zeros + lane, &some.zeros, sizeof some.zeros);
        }
        row.min = row.finite_min = lowest(lows, T(1));
        row.max = row.finite_max = lowest(highs, T(-1));
        row.zeros = whole < n ? n - whole - LANES : 0;  // the rest is filled with zeros
        for (const Integer<T> count : zeros) row.zeros += count;
        s2 = total(all.s2), row.l1 = total(all.l1);
        const double e = total(all.s1) / n, ee = e * e, m2 = s2 - n * ee;
        row.mean = shift + e;
        row.m2 = m2 < 0 ? 0 : m2;
        if constexpr ((WANTED & HIGHER) != 0) {
            const double s3 = total(all.s3), s4 = total(all.s4);
            row.m3 = s3 - 3 * e * s2 + 2 * n * ee * e;
            row.m4 = s4 - 4 * e * s3 + 6 * ee * s2 - 3 * n * ee * ee;
        }
    }
    if (sizeof(T) == sizeof(double)) return std::isfinite(row.sumsq + s2);
    if (row.zeros == n) return true;
    const bool is_high = WANTED & HIGHER;
    if (is_high && !(row.m2 > 1e-14 * n && s2 < 1e14 * n)) return false;
    return row.sumsq > 1e-28 * n && row.sumsq < 1e28 * n && s2 < 1e28 * n;
}

// The mean of at most 256 numbers at equal distances; deviations from it lose few digits.
template <class S> double rough_mean(const S &x, int64_t first, int n) {
    const int step = (n + 255) / 256;
    double sums[4] = {};
    int count = 0;
    for (int i = 0; i < n; i += step) sums[count++ % 4] += x.one(first + i);
    return (sums[0] + sums[1] + sums[2] + sums[3]) / count;
}

// Read a run in double, with deviations from its own mean; if that is not finite, the finite elements, and count the others.
template <int WANTED> __attribute__((noinline)) void reread_run(double *x, int n, Record &row) {
    const Plain<double> numbers{x};
    row = Record();
    if (read_run<WANTED>(numbers, 0, n, WANTED ? rough_mean(numbers, 0, n) : 0.0, row)) return;
    double low = std::numeric_limits<double>::infinity(), high = -low;
    int k = 0, nans = 0, infs = 0;
    for (int i = 0; i < n; i++) {
        const double v = x[i];
        if (std::isfinite(v)) x[k++] = v;
        else if (std::isnan(v)) nans++;
        else infs++, low = v < low ? v : low, high = v > high ? v : high;
    }
    row = Record();
    if (k) read_run<WANTED>(numbers, 0, k, WANTED ? rough_mean(numbers, 0, k) : 0.0, row);
    row.n = n, row.nans = nans, row.infs = infs;
    row.min = low < row.min ? low : row.min;
    row.max = high > row.max ? high : row.max;
}

// Copy, past the caches if many bytes are copied in all, since they would push out everything else.
INLINE void copy_bytes(char *y, const char *x, int64_t n, bool is_large) {
    int64_t i = 0;
#ifdef STREAM
    using Line = Pack<float>;
    if (is_large && reinterpret_cast<uintptr_t>(y) % WIDTH == 0)
        for (; i + 64 <= n; i += 64) {
            __builtin_prefetch(x + i + 4096);
            const Line line = load<Line::SIZE * Line::PARTS>(reinterpret_cast<const float *>(x + i));
            for (int k = 0; k < Line::PARTS; k++) STREAM(reinterpret_cast<float *>(y + i) + k * Line::SIZE, line.part[k]);
        }
#endif
    std::memcpy(y + i, x + i, n - i);
}

// Add the statistics of numbers to a record; a record with n = 0 is reset.  Each run is copied first if there is a place for that, so
// that it is read from memory once.  Deviations are from the mean of the run before: the digits that they lose by that are few beside
// the squared distance of the two means, which the merge adds.
template <int WANTED, class S> void measure_numbers(const S &x, const Job &job, bool is_copied) {
    using Number = typename S::Number;
    Record *const out = job.row;
    if (out->n == 0) *out = Record();
    const int64_t size = BYTES[job.dtype];
    char *const to = static_cast<char *>(job.other);
    const char *const from = static_cast<const char *>(job.numbers);
    double center = 0;
    for (int64_t i = 0; i < job.n; i += RUN) {
        const int n = static_cast<int>(job.n - i < RUN ? job.n - i : RUN);
        if (is_copied)
            copy_bytes(to + i * size, from + i * size, n * size, job.is_large);
        if (WANTED && i == 0) center = rough_mean(x, i, n);
        Record row;
        bool is_done;
        if constexpr (std::is_same_v<S, Plain<Number>> || std::is_same_v<S, Difference<Plain<float>>>) {
            is_done = read_run<WANTED>(x, i, n, center, row);
        } else {  // fewer functions to compile
            Number run[RUN];
            for (int j = 0; j < n; j++) run[j] = x.one(i + j);
            is_done = read_run<WANTED>(Plain<Number>{run}, 0, n, center, row);
        }
        if (!is_done) {
            double wide[RUN];
            for (int j = 0; j < n; j++) wide[j] = x.one(i + j);
            reread_run<WANTED>(wide, n, row);
        }
        if (row.finite() > 0) center = row.mean;
        out->merge(row, WANTED);
    }
    if (out->nans > 0) out->min = out->max = std::numeric_limits<double>::quiet_NaN();
}

template <class S> void measure_source(const S &x, const Job &job, bool is_copied) {
    if (job.wanted == 0) measure_numbers<0>(x, job, is_copied);
    else if (job.wanted == LINEAR) measure_numbers<LINEAR>(x, job, is_copied);
    else measure_numbers<LINEAR | HIGHER>(x, job, is_copied);
}

template <class S, class T> void measure_as(const Job &job) {
    measure_source(S{static_cast<const T *>(job.numbers)}, job, job.other);
}

void measure_job(const Job &job) {
    if (job.wanted < 0)
        copy_bytes(static_cast<char *>(job.other), static_cast<const char *>(job.numbers), job.n * BYTES[job.dtype], job.is_large);
    else if (job.dtype == FLOAT32) measure_as<Plain<float>, float>(job);
    else if (job.dtype == FLOAT64) measure_as<Plain<double>, double>(job);
    else measure_as<Bfloat16, uint16_t>(job);
#ifdef STREAM
    _mm_sfence();  // other threads read the copy
#endif
}

template <class S, class T> void subtract_as(const Job &job) {
    measure_source(Difference<S>{S{static_cast<const T *>(job.numbers)}, S{static_cast<const T *>(job.other)}}, job, false);
}

void subtract_job(const Job &job) {
    if (job.dtype == FLOAT32) subtract_as<Plain<float>, float>(job);
    else if (job.dtype == FLOAT64) subtract_as<Plain<double>, double>(job);
    else subtract_as<Bfloat16, uint16_t>(job);
}

// ---- float codes -----------------------------------------------------------------------------------------------------------

// Add the four counters of each bin, and put the bins in order.
void finish(int64_t *counts, int64_t half) {
    for (int64_t bin = 0; bin < 2 * half; bin++) {
        uint64_t four;
        std::memcpy(&four, counts + bin, sizeof four);
        counts[bin] = (four & 0xffff) + (four >> 16 & 0xffff) + (four >> 32 & 0xffff) + (four >> 48);
    }
    std::reverse(counts, counts + half);
}

// Mix the bits of a number, so that successive ones look random (the finalizer of MurmurHash3, Appleby 2011).
INLINE uint32_t mixed(uint32_t h) {
    h = (h ^ (h >> 16)) * 0x85ebca6bu;
    h = (h ^ (h >> 13)) * 0xc2b2ae35u;
    return h ^ (h >> 16);
}

// Draw one number from each of DRAWN successive parts, of the PARTS parts into which n numbers are divided.
void draw(int64_t *at, int64_t first, int64_t n, uint32_t seed) {
#pragma omp simd
    for (int64_t j = 0; j < DRAWN; j++) {
        const int64_t i = first + j, begin = (i * n) >> 16, end = ((i + 1) * n) >> 16;
        const uint64_t random = mixed(seed + 0x9e3779b9u * static_cast<uint32_t>(i));
        at[j] = begin + static_cast<int64_t>((random * static_cast<uint64_t>(end - begin)) >> 32);
    }
}

const Kernels kernels = {measure_job, subtract_job, finish, draw};

#undef EACH
#undef OPERATOR
#undef WIDTH
#undef STREAM
#undef WIDEN
