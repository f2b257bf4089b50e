// Statistics of many numbers in one look: what `ikkuna.numerics.measure` does with several operators, fused.
//
// A row of 2,048 numbers stays in the innermost cache for a second look and is short enough for sums in its own precision.
// Rows merge in double (Chan, Golub & LeVeque 1979; Pebay 2008).  A row whose sums are suspicious (not finite, or of
// numbers whose powers float does not have) is looked at again in double, and element by element if that does not help.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int ROW = 2048;

// What is wanted, besides the sum of squares and the number of elements.
enum Wanted { LINEAR = 1, SECOND = 2, HIGHER = 4, EXTREMES = 8 };

// In the order in which `look.py` reads it.
struct Record {
    double n = 0, nans = 0, infs = 0, zeros = 0, l1 = 0, sumsq = 0, mean = 0, m2 = 0, m3 = 0, m4 = 0;
    double min = std::numeric_limits<double>::infinity(), max = -std::numeric_limits<double>::infinity();

    double finite() const { return n - nans - infs; }

    void merge(const Record &b, int wanted) {
        if (wanted & LINEAR) merge_moments(b, wanted);
        n += b.n, nans += b.nans, infs += b.infs, zeros += b.zeros, l1 += b.l1, sumsq += b.sumsq;
        min = b.min < min ? b.min : min;
        max = b.max > max ? b.max : max;
    }

    void merge_moments(const Record &b, int wanted) {
        const double na = finite(), nb = b.finite(), all = na + nb;
        if (nb == 0) return;
        if (na == 0) {
            mean = b.mean, m2 = b.m2, m3 = b.m3, m4 = b.m4;
            return;
        }
        const double d = b.mean - mean, dd = d * d, share = nb / all;
        if (wanted & HIGHER) {
            m4 += b.m4 + dd * dd * na * share * (na * na - na * nb + nb * nb) / (all * all)
                + 6 * dd * (na * na * b.m2 + nb * nb * m2) / (all * all) + 4 * d * (na * b.m3 - nb * m3) / all;
            m3 += b.m3 + dd * d * na * share * (na - nb) / all + 3 * d * (na * b.m2 - nb * m2) / all;
        }
        m2 += b.m2 + dd * na * share;
        mean += d * share;
    }
};

// Add the moments of a row about its mean.
template <class A, class T>
void look_again(const T *x, int n, int wanted, Record &row) {
    const int half = n / 2;
    const T *y = x + half;
    const A mean = static_cast<A>(row.mean), one = n % 2 ? x[n - 1] - mean : A(0);
    A p2 = one * one, q2 = 0, p3 = p2 * one, q3 = 0, p4 = p2 * p2, q4 = 0;
    if (wanted & HIGHER) {
#pragma omp simd reduction(+ : p2, q2, p3, q3, p4, q4)
        for (int i = 0; i < half; i++) {
            const A d = x[i] - mean, e = y[i] - mean, dd = d * d, ee = e * e;
            p2 += dd, q2 += ee;
            p3 += dd * d, q3 += ee * e;
            p4 += dd * dd, q4 += ee * ee;
        }
    } else {
#pragma omp simd reduction(+ : p2, q2)
        for (int i = 0; i < half; i++) {
            const A d = x[i] - mean, e = y[i] - mean;
            p2 += d * d, q2 += e * e;
        }
    }
    const double s2 = p2 + q2, s3 = p3 + q3, s4 = p4 + q4, e = row.mean - mean, ee = e * e;
    row.m2 = s2 - n * ee > 0 ? s2 - n * ee : 0;
    row.m3 = s3 - 3 * e * s2 + 2 * n * ee * e;
    row.m4 = s4 - 4 * e * s3 + 6 * ee * s2 - 3 * n * ee * ee;
}

// Look at a row in the precision of A, with a mean in double; the second look is about that mean rounded to A, and corrected for it.
// Its halves are read side by side, since an addition waits for the one before it; an odd number is the last.
template <class A, class T>
Record look(const T *x, int n, int wanted) {
    Record row;
    row.n = n;
    const int half = n / 2;
    const T *y = x + half;
    const bool odd = n % 2;
    const A last = x[n - 1], one = odd ? last : A(0);
    A p2 = one * one, q2 = 0, low = last, high = last, low2 = last, high2 = last;
    if (wanted & LINEAR) {
        double p1 = one, q1 = 0;
        A pl = std::fabs(one), ql = 0, pz = odd && last == 0 ? A(1) : A(0), qz = 0;
#pragma omp simd reduction(+ : p1, q1, p2, q2, pl, ql, pz, qz) reduction(min : low, low2) reduction(max : high, high2)
        for (int i = 0; i < half; i++) {
            const A v = x[i], w = y[i];
            p1 += v, q1 += w;
            p2 += v * v, q2 += w * w;
            pl += std::fabs(v), ql += std::fabs(w);
            pz += v == 0 ? A(1) : A(0), qz += w == 0 ? A(1) : A(0);
            low = v < low ? v : low, low2 = w < low2 ? w : low2;
            high = v > high ? v : high, high2 = w > high2 ? w : high2;
        }
        row.mean = (p1 + q1) / n, row.l1 = pl + ql, row.zeros = pz + qz;
    } else if (wanted & EXTREMES) {
#pragma omp simd reduction(+ : p2, q2) reduction(min : low, low2) reduction(max : high, high2)
        for (int i = 0; i < half; i++) {
            const A v = x[i], w = y[i];
            p2 += v * v, q2 += w * w;
            low = v < low ? v : low, low2 = w < low2 ? w : low2;
            high = v > high ? v : high, high2 = w > high2 ? w : high2;
        }
    } else {
#pragma omp simd reduction(+ : p2, q2)
        for (int i = 0; i < half; i++) {
            const A v = x[i], w = y[i];
            p2 += v * v, q2 += w * w;
        }
    }
    row.sumsq = p2 + q2;
    row.min = low < low2 ? low : low2, row.max = high > high2 ? high : high2;
    if (wanted & (SECOND | HIGHER)) look_again<A>(x, n, wanted, row);
    return row;
}

// Whether float had room for what was summed.
bool fits(const Record &row, int wanted) {
    if (row.zeros == row.n) return true;
    const double n = row.n;
    if (!(row.sumsq > 1e-28 * n && row.sumsq < 1e28 * n)) return false;
    return !(wanted & HIGHER) || (row.m2 > 1e-14 * n && row.m2 < 1e14 * n);
}

// Look at the finite elements, and count the others.
template <class T>
Record screen(const T *x, int n, int wanted) {
    double finite[ROW], low = std::numeric_limits<double>::infinity(), high = -low;
    int k = 0, nans = 0, infs = 0;
    for (int i = 0; i < n; i++) {
        const double v = x[i];
        if (std::isfinite(v)) finite[k++] = v;
        else if (std::isnan(v)) nans++;
        else infs++, low = v < low ? v : low, high = v > high ? v : high;
    }
    Record row = k ? look<double>(finite, k, wanted) : Record();
    row.n = n, row.nans = nans, row.infs = infs;
    row.min = low < row.min ? low : row.min;
    row.max = high > row.max ? high : row.max;
    return row;
}

template <class T>
Record read(const T *x, int n, int wanted) {
    Record row = look<T>(x, n, wanted);
    if (sizeof(T) < sizeof(double) && !fits(row, wanted)) row = look<double>(x, n, wanted);
    return std::isfinite(row.sumsq) ? row : screen(x, n, wanted);
}

float widened(uint16_t bfloat16) {
    const uint32_t bits = static_cast<uint32_t>(bfloat16) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

Record read(const uint16_t *x, int n, int wanted) {
    float row[ROW];
    for (int i = 0; i < n; i++) row[i] = widened(x[i]);
    return read(row, n, wanted);
}

// Add to a record what `read_row(first, length)` returns of n numbers; one of zeros alone has seen nothing.
template <class ReadRow>
void measure(int64_t n, int wanted, Record *out, ReadRow read_row) {
    if (out->n == 0) *out = Record();
    for (int64_t i = 0; i < n; i += ROW) out->merge(read_row(i, n - i < ROW ? static_cast<int>(n - i) : ROW), wanted);
    if (out->nans > 0) out->min = out->max = std::numeric_limits<double>::quiet_NaN();
}

template <class T>
void measure_one(const T *x, int64_t n, int wanted, Record *out) {
    measure(n, wanted, out, [=](int64_t i, int length) { return read(x + i, length, wanted); });
}

// The difference is rounded as that of two tensors would be, but is never written anywhere.
template <class T>
void measure_difference(const T *x, const T *y, int64_t n, int wanted, Record *out) {
    measure(n, wanted, out, [=](int64_t i, int length) {
        T row[ROW];
        for (int j = 0; j < length; j++) row[j] = x[i + j] - y[i + j];
        return read(row, length, wanted);
    });
}

int32_t bits(float x) {
    int32_t all;
    std::memcpy(&all, &x, sizeof all);
    return all;
}
int32_t bits(double x) { return bits(static_cast<float>(x)); }
int32_t bits(uint16_t x) { return bits(widened(x)); }

// While it counts, a count is four counters of 16 bits.  Neighbours use them in turn: of equal ones the next need not wait for the last.
constexpr int LANES = 4;
constexpr int64_t FULL = LANES * int64_t(65535);

// Clear the counts.
void begin(int64_t *counts, int64_t half) { std::memset(counts, 0, 2 * half * sizeof *counts); }

// Count codes, the leading bits of n numbers, at most FULL in all; those of negative numbers by rising magnitude.
template <class Code>
void tally(int64_t *counts, int64_t half, int64_t n, Code code) {
    uint16_t *zero = reinterpret_cast<uint16_t *>(counts + half);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) zero[code(i + lane) * LANES + lane]++;
    for (; i < n; i++) zero[code(i) * LANES + i % LANES]++;
}

// Add up what was counted, and put the bins in order.
void finish(int64_t *counts, int64_t half) {
    for (int64_t bin = 0; bin < 2 * half; bin++) {
        uint64_t four;
        std::memcpy(&four, counts + bin, sizeof four);
        counts[bin] = (four & 0xffff) + (four >> 16 & 0xffff) + (four >> 32 & 0xffff) + (four >> 48);
    }
    std::reverse(counts, counts + half);
}

// Count sign, exponent and 23 - shift bits of the mantissa of each of at most FULL numbers.
template <class T>
void codes_of_some(const T *x, int64_t n, int shift, int64_t *counts, int64_t half) {
    begin(counts, half);
    tally(counts, half, n, [=](int64_t i) { return static_cast<int64_t>(bits(x[i]) >> shift); });
    finish(counts, half);
}

// The same of any number of them.
template <class T>
void codes(const T *x, int64_t n, int shift, int64_t *counts, int64_t half) {
    codes_of_some(x, n < FULL ? n : FULL, shift, counts, half);
    if (n <= FULL) return;
    std::vector<int64_t> more(2 * half);
    for (int64_t first = FULL; first < n; first += FULL) {
        codes_of_some(x + first, n - first < FULL ? n - first : FULL, shift, more.data(), half);
        for (int64_t bin = 0; bin < 2 * half; bin++) counts[bin] += more[bin];
    }
}

// Mix the bits of a number, so that successive ones look random (the finalizer of MurmurHash3, Appleby 2011).
uint32_t mixed(uint32_t h) {
    h = (h ^ (h >> 16)) * 0x85ebca6bu;
    h = (h ^ (h >> 13)) * 0xc2b2ae35u;
    return h ^ (h >> 16);
}

constexpr int64_t RUNS = 1 << 16, FAR = 1 << 20;  // beyond, every number drawn lies in a cache line of its own

// Draw one number from each of ROW successive runs of the RUNS that n numbers are divided into.
void draw(int64_t *at, int64_t first, int64_t n, uint32_t seed) {
#pragma omp simd
    for (int64_t j = 0; j < ROW; j++) {
        const int64_t i = first + j, begin = (i * n) >> 16, end = ((i + 1) * n) >> 16;
        const uint64_t random = mixed(seed + 0x9e3779b9u * static_cast<uint32_t>(i));
        at[j] = begin + static_cast<int64_t>((random * static_cast<uint64_t>(end - begin)) >> 32);
    }
}

// The same of one number out of each of 2^16 equal runs, which stands for all of its run.
template <class T>
void sampled_codes(const T *x, int64_t n, int shift, int64_t *counts, int64_t half, uint32_t seed) {
    int64_t at[ROW];
    begin(counts, half);
    for (int64_t first = 0; first < RUNS; first += ROW) {
        draw(at, first, n, seed);
        if (n > FAR) for (const int64_t place : at) __builtin_prefetch(x + place, 0, 2);
        tally(counts, half, ROW, [&](int64_t i) { return static_cast<int64_t>(bits(x[at[i]]) >> shift); });
    }
    finish(counts, half);
    const double share = static_cast<double>(n) / RUNS;
    for (int64_t bin = 0; bin < 2 * half; bin++) counts[bin] = static_cast<int64_t>(std::nearbyint(counts[bin] * share));
}

}  // namespace

#define EXPORT(NAME, T)                                                                                               \
    extern "C" void measure_##NAME(const void *x, int64_t n, int wanted, void *out) {                                 \
        measure_one(static_cast<const T *>(x), n, wanted, static_cast<Record *>(out));                                \
    }                                                                                                                 \
    extern "C" void codes_##NAME(const void *x, int64_t n, int shift, void *counts, int64_t half) {                   \
        codes(static_cast<const T *>(x), n, shift, static_cast<int64_t *>(counts), half);                             \
    }                                                                                                                 \
    extern "C" void sampled_codes_##NAME(const void *x, int64_t n, int shift, void *counts, int64_t half,             \
                                         uint32_t seed) {                                                             \
        sampled_codes(static_cast<const T *>(x), n, shift, static_cast<int64_t *>(counts), half, seed);               \
    }

extern "C" void merge_records(const void *more, int wanted, void *out) {
    Record &known = *static_cast<Record *>(out);
    if (known.n == 0) known = Record();
    known.merge(*static_cast<const Record *>(more), wanted);
    if (known.nans > 0) known.min = known.max = std::numeric_limits<double>::quiet_NaN();
}

EXPORT(float32, float)
EXPORT(float64, double)
EXPORT(bfloat16, uint16_t)

#define EXPORT_DIFFERENCE(NAME, T)                                                                                    \
    extern "C" void measure_difference_##NAME(const void *x, const void *y, int64_t n, int wanted, void *out) {       \
        measure_difference(static_cast<const T *>(x), static_cast<const T *>(y), n, wanted,                           \
                           static_cast<Record *>(out));                                                               \
    }

EXPORT_DIFFERENCE(float32, float)
EXPORT_DIFFERENCE(float64, double)
