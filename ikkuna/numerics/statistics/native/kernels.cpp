// Statistics of many numbers, which are read from memory once.
//
// A run of 1,024 numbers stays in the innermost cache for a second pass and is short enough for sums in its own precision.
// Runs merge in double (Chan, Golub & LeVeque 1979; Pebay 2008).  A run whose sums are not finite, or exceed what float
// can represent, is read again in double, and element by element if that does not help.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <type_traits>
#include <vector>

namespace {

constexpr int RUN = 1024;

// The statistics to compute, besides the sum of squares and the number of elements; LINEAR includes the second moment and extremes.
enum Wanted { LINEAR = 1, HIGHER = 2, EXTREMES = 4 };

// A row of the table; `table.py` has the same order of columns.
struct Record {
    double n = 0, nans = 0, infs = 0, zeros = 0, l1 = 0, sumsq = 0, mean = 0, m2 = 0, m3 = 0, m4 = 0;
    double min = std::numeric_limits<double>::infinity(), max = -min;
    double finite_min = min, finite_max = max;

    double finite() const { return n - nans - infs; }

    void merge(const Record &b, int wanted) {
        if (!wanted) {
            n += b.n, nans += b.nans, infs += b.infs, sumsq += b.sumsq;
            return;
        }
        if (wanted & LINEAR) merge_moments(b, wanted);
        n += b.n, nans += b.nans, infs += b.infs, zeros += b.zeros, l1 += b.l1, sumsq += b.sumsq;
        min = b.min < min ? b.min : min;
        max = b.max > max ? b.max : max;
        finite_min = b.finite_min < finite_min ? b.finite_min : finite_min;
        finite_max = b.finite_max > finite_max ? b.finite_max : finite_max;
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

#define INLINE inline __attribute__((always_inline))  // loops are faster when the compiler knows their length

constexpr int SUMS = 32;  // independent sums: an addition waits for the one before it

// The sum of squares of a run, the most frequent statistic.  The numbers are read in the order of memory, in which the processor
// fetches them ahead.
template <class A, class T>
INLINE A sum_of_squares(const T *x, int n) {
    A sums[SUMS] = {}, all = 0;
    int i = 0;
    for (; i + SUMS <= n; i += SUMS)
#pragma omp simd
        for (int j = 0; j < SUMS; j++) sums[j] += A(x[i + j]) * A(x[i + j]);
    for (; i < n; i++) all += A(x[i]) * A(x[i]);
#pragma omp simd reduction(+ : all)
    for (int j = 0; j < SUMS; j++) all += sums[j];
    return all;
}

template <class T>
INLINE double sum(const T *x, int n) {
    double sums[SUMS / 2] = {}, all = 0;
    int i = 0;
    for (; i + SUMS / 2 <= n; i += SUMS / 2)
#pragma omp simd
        for (int j = 0; j < SUMS / 2; j++) sums[j] += x[i + j];
    for (; i < n; i++) all += x[i];
#pragma omp simd reduction(+ : all)
    for (int j = 0; j < SUMS / 2; j++) all += sums[j];
    return all;
}

template <class A, class T>
void set_extremes(const T *x, int n, Record &row) {
    A low = std::numeric_limits<A>::infinity(), high = -low;
#pragma omp simd reduction(min : low) reduction(max : high)
    for (int i = 0; i < n; i++) {
        const A v = x[i];
        low = v < low ? v : low;
        high = v > high ? v : high;
    }
    row.min = row.finite_min = low, row.max = row.finite_max = high;
}

// Set everything but the higher moments.  Deviations are from the mean, rounded to A, and corrected for that.  Meanwhile the next run
// is fetched from memory.
template <class A, class T>
INLINE void set_linear(const T *x, int n, Record &row) {
    constexpr int BLOCK = 128, LINE = 64 / sizeof(T);
    row.mean = sum(x, n) / n;
    const A mean = static_cast<A>(row.mean);
    A squares = 0, l1 = 0, s2 = 0, low = std::numeric_limits<A>::infinity(), high = -low;
    std::conditional_t<sizeof(A) == 4, int32_t, int64_t> zeros = 0;  // as wide as A, for the same vector registers
    for (int first = 0; first < n; first += BLOCK) {
        const T *block = x + first;
        const int length = n - first < BLOCK ? n - first : BLOCK;
        for (int i = 0; i < length; i += LINE) __builtin_prefetch(block + n + i);
#pragma omp simd reduction(+ : squares, l1, s2, zeros) reduction(min : low) reduction(max : high)
        for (int i = 0; i < length; i++) {
            const A v = block[i], d = v - mean;
            squares += v * v, l1 += std::fabs(v), s2 += d * d;
            zeros += v == 0;
            low = v < low ? v : low;
            high = v > high ? v : high;
        }
    }
    const double e = row.mean - mean, m2 = s2 - n * e * e;
    row.sumsq = squares, row.l1 = l1, row.zeros = zeros, row.m2 = m2 < 0 ? 0 : m2;
    row.min = row.finite_min = low, row.max = row.finite_max = high;
}

// Set the third and the fourth moment of a run whose mean and second moment are known.
template <class A, class T>
void set_higher(const T *x, int n, Record &row) {
    const A mean = static_cast<A>(row.mean);
    A s3 = 0, s4 = 0;
#pragma omp simd reduction(+ : s3, s4)
    for (int i = 0; i < n; i++) {
        const A d = x[i] - mean, dd = d * d;
        s3 += dd * d, s4 += dd * dd;
    }
    const double e = row.mean - mean, ee = e * e, s2 = row.m2 + n * ee;
    row.m3 = s3 - 3 * e * s2 + 2 * n * ee * e;
    row.m4 = s4 - 4 * e * s3 + 6 * ee * s2 - 3 * n * ee * ee;
}

// Read a run in the precision of A, with a mean in double.
template <class A, class T>
INLINE Record read_as(const T *x, int n, int wanted) {
    Record row;
    row.n = n;
    if (wanted & LINEAR) {
        set_linear<A>(x, n, row);
        if (wanted & HIGHER) set_higher<A>(x, n, row);
    } else {
        row.sumsq = sum_of_squares<A>(x, n);
        if (wanted & EXTREMES) set_extremes<A>(x, n, row);
    }
    return row;
}

// Whether float can represent the sums.
bool fits(const Record &row, int wanted) {
    if (row.zeros == row.n) return true;
    const double n = row.n;
    if (!(row.sumsq > 1e-28 * n && row.sumsq < 1e28 * n)) return false;
    return !(wanted & HIGHER) || (row.m2 > 1e-14 * n && row.m2 < 1e14 * n);
}

// Read the finite elements, and count the others.
template <class T>
Record screen(const T *x, int n, int wanted) {
    double finite[RUN], low = std::numeric_limits<double>::infinity(), high = -low;
    int k = 0, nans = 0, infs = 0;
    for (int i = 0; i < n; i++) {
        const double v = x[i];
        if (std::isfinite(v)) finite[k++] = v;
        else if (std::isnan(v)) nans++;
        else infs++, low = v < low ? v : low, high = v > high ? v : high;
    }
    Record row = k ? read_as<double>(finite, k, wanted) : Record();
    row.n = n, row.nans = nans, row.infs = infs;
    row.min = low < row.min ? low : row.min;
    row.max = high > row.max ? high : row.max;
    return row;
}

template <class T>
Record read(const T *x, int n, int wanted) {
    Record row = read_as<T>(x, n, wanted);
    if (sizeof(T) < sizeof(double) && !fits(row, wanted)) row = read_as<double>(x, n, wanted);
    return std::isfinite(row.sumsq) ? row : screen(x, n, wanted);
}

float widened(uint16_t bfloat16) {
    const uint32_t bits = static_cast<uint32_t>(bfloat16) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

Record read(const uint16_t *x, int n, int wanted) {
    float row[RUN];
    for (int i = 0; i < n; i++) row[i] = widened(x[i]);
    return read(row, n, wanted);
}

// Add to a record what `read_run(first, length)` returns for n numbers; a record with n = 0 is reset.
template <class ReadRun>
void measure(int64_t n, int wanted, Record *out, ReadRun read_run) {
    if (out->n == 0) *out = Record();
    int64_t i = 0;
    for (; n - i >= RUN; i += RUN) out->merge(read_run(i, RUN), wanted);
    if (i < n) out->merge(read_run(i, static_cast<int>(n - i)), wanted);
    if (out->nans > 0) out->min = out->max = std::numeric_limits<double>::quiet_NaN();
}

template <class T>
void measure_one(const T *x, int64_t n, int wanted, Record *out) {
    measure(n, wanted, out, [=](int64_t i, int length) { return read(x + i, length, wanted); });
}

// The same while the numbers are copied, so that they are read from memory once.
template <class T>
void measure_and_copy(const T *x, T *y, int64_t n, int wanted, Record *out) {
    measure(n, wanted, out, [=](int64_t i, int length) {
        std::memcpy(y + i, x + i, length * sizeof(T));
        return read(x + i, length, wanted);
    });
}

// The difference is rounded as that of two tensors, but is not written to memory.
template <class T>
void measure_difference(const T *x, const T *y, int64_t n, int wanted, Record *out) {
    measure(n, wanted, out, [=](int64_t i, int length) {
        T row[RUN];
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

// During counting, a count is four counters of 16 bits.  Neighbours use them in turn, so equal numbers do not wait for each other.
constexpr int LANES = 4;
constexpr int64_t FULL = LANES * int64_t(65535);

// Clear the counts.
void begin(int64_t *counts, int64_t half) { std::memset(counts, 0, 2 * half * sizeof *counts); }

// Count codes, the leading bits of n numbers, at most FULL of them; those of negative numbers by rising magnitude.
template <class Code>
void tally(int64_t *counts, int64_t half, int64_t n, Code code) {
    uint16_t *zero = reinterpret_cast<uint16_t *>(counts + half);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) zero[code(i + lane) * LANES + lane]++;
    for (; i < n; i++) zero[code(i) * LANES + i % LANES]++;
}

// Add the four counters of each bin, and put the bins in order.
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

// The same for any n.
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

constexpr int64_t PARTS = 1 << 16, FAR = 1 << 20;  // above FAR, every drawn number lies in another cache line

// Draw one number from each of RUN successive parts, of the PARTS parts into which n numbers are divided.
void draw(int64_t *at, int64_t first, int64_t n, uint32_t seed) {
#pragma omp simd
    for (int64_t j = 0; j < RUN; j++) {
        const int64_t i = first + j, begin = (i * n) >> 16, end = ((i + 1) * n) >> 16;
        const uint64_t random = mixed(seed + 0x9e3779b9u * static_cast<uint32_t>(i));
        at[j] = begin + static_cast<int64_t>((random * static_cast<uint64_t>(end - begin)) >> 32);
    }
}

// The same for one number out of each of 2^16 equal parts, which represents its part.
template <class T>
void sampled_codes(const T *x, int64_t n, int shift, int64_t *counts, int64_t half, uint32_t seed) {
    int64_t at[RUN];
    begin(counts, half);
    for (int64_t first = 0; first < PARTS; first += RUN) {
        draw(at, first, n, seed);
        if (n > FAR) for (const int64_t i : at) __builtin_prefetch(x + i, 0, 2);
        tally(counts, half, RUN, [&](int64_t i) { return static_cast<int64_t>(bits(x[at[i]]) >> shift); });
    }
    finish(counts, half);
    const double share = static_cast<double>(n) / PARTS;
    for (int64_t bin = 0; bin < 2 * half; bin++) counts[bin] = static_cast<int64_t>(std::nearbyint(counts[bin] * share));
}

}  // namespace

extern "C" void merge_records(const void *more, int wanted, void *out) {
    Record &known = *static_cast<Record *>(out);
    if (known.n == 0) known = Record();
    known.merge(*static_cast<const Record *>(more), wanted);
    if (known.nans > 0) known.min = known.max = std::numeric_limits<double>::quiet_NaN();
}

// ---- several threads ---------------------------------------------------------------------------------------------------
//
// Large tensors are divided into parts, which are measured by themselves and merged in their order, so that the number of threads
// changes no result.  The threads are those in which torch computes: others would compete with them for the processor.

namespace {

constexpr int64_t PART = 1 << 19;

using Range = void (*)(int64_t, int64_t, void *);
using ParallelFor = int32_t (*)(int64_t, int64_t, int64_t, Range, void *);
ParallelFor parallel_for;  // of torch's stable interface; null for the calling thread alone

// Call `work(i)` for each i below `count`; a thread takes the next one when it has finished one.
template <class Work>
void for_each(int64_t count, Work work) {
    struct Shared {
        Work &work;
        int64_t count;
        std::atomic<int64_t> next;
    } shared{work, count, {0}};
    const Range take = [](int64_t, int64_t, void *context) {
        Shared &all = *static_cast<Shared *>(context);
        for (int64_t i; (i = all.next++) < all.count;) all.work(i);
    };
    if (count < 2 || !parallel_for || parallel_for(0, count, 1, take, &shared)) take(0, count, &shared);
}

enum { FLOAT32, FLOAT64, BFLOAT16 };
constexpr int64_t BYTES[] = {4, 8, 2};

// Numbers to measure; `other` is where they are copied to, or what is subtracted from them; `wanted` is -1 for a copy alone.
struct Job {
    const void *numbers;
    void *other;
    int64_t n;
    int dtype, wanted;
    Record *row;
};

template <class T>
void measure_as(const Job &job) {
    const T *x = static_cast<const T *>(job.numbers);
    T *y = static_cast<T *>(job.other);
    if (job.wanted < 0) std::memcpy(y, x, job.n * sizeof(T));
    else if (y) measure_and_copy(x, y, job.n, job.wanted, job.row);
    else measure_one(x, job.n, job.wanted, job.row);
}

void measure_job(const Job &job) {
    if (job.dtype == FLOAT32) measure_as<float>(job);
    else if (job.dtype == FLOAT64) measure_as<double>(job);
    else measure_as<uint16_t>(job);
}

template <class T>
void subtract_as(const Job &job) {
    measure_difference(static_cast<const T *>(job.numbers), static_cast<const T *>(job.other), job.n, job.wanted, job.row);
}

void subtract_job(const Job &job) {
    if (job.dtype == FLOAT32) subtract_as<float>(job);
    else subtract_as<double>(job);
}

int64_t parts_of(const Job &job) { return (job.n + PART - 1) / PART; }

// The part of a job that begins at an element; that of a job with several parts is measured into `record`.
Job part_of(const Job &job, int64_t first, Record *record) {
    Job part = job;
    part.numbers = static_cast<const char *>(job.numbers) + first * BYTES[job.dtype];
    if (job.other) part.other = static_cast<char *>(job.other) + first * BYTES[job.dtype];
    part.n = job.n - first < PART ? job.n - first : PART;
    if (job.n > PART) part.row = record;
    return part;
}

void merge_part(const Job &job, const Record *record) {
    if (job.n > PART && job.wanted >= 0) merge_records(record, job.wanted, job.row);
}

// Whether there is memory for so many elements; nothing may be thrown out of this library.
template <class T>
bool reserve(std::vector<T> &list, int64_t count) {
    try {
        list.reserve(count);
    } catch (const std::exception &) {
        return false;
    }
    return true;
}

template <class Do>
void run_alone(const Job &job, Do do_one) {
    for (int64_t first = 0; first < job.n; first += PART) {
        Record record;
        do_one(part_of(job, first, &record));
        merge_part(job, &record);
    }
}

// Do jobs for different rows.
template <class Do>
void run(const std::vector<Job> &jobs, Do do_one) {
    int64_t count = 0;
    for (const Job &job : jobs) count += parts_of(job);
    std::vector<Record> records;
    std::vector<Job> parts;
    if (!reserve(records, count) || !reserve(parts, count)) {
        for (const Job &job : jobs) run_alone(job, do_one);
        return;
    }
    records.resize(count);
    for (const Job &job : jobs)
        for (int64_t first = 0; first < job.n; first += PART) parts.push_back(part_of(job, first, &records[parts.size()]));
    for_each(count, [&](int64_t i) { do_one(parts[i]); });
    const Record *next = records.data();
    for (const Job &job : jobs)
        for (const Record *end = next + parts_of(job); next < end; next++) merge_part(job, next);
}

template <class Do>
void run(const Job &job, Do do_one) {
    std::vector<Job> jobs;
    if (job.n <= PART || !reserve(jobs, 1)) {
        run_alone(job, do_one);
        return;
    }
    jobs.push_back(job);
    run(jobs, do_one);
}

}  // namespace

// Take the function of torch that runs another one in several threads, or null.
extern "C" void set_parallel_for(void *function) { parallel_for = reinterpret_cast<ParallelFor>(function); }

#define EXPORT(NAME, T, DTYPE)                                                                                        \
    extern "C" void measure_##NAME(const void *x, int64_t n, int wanted, void *out) {                                 \
        run(Job{x, nullptr, n, DTYPE, wanted, static_cast<Record *>(out)}, measure_job);                              \
    }                                                                                                                 \
    extern "C" void codes_##NAME(const void *x, int64_t n, int shift, void *counts, int64_t half) {                   \
        codes(static_cast<const T *>(x), n, shift, static_cast<int64_t *>(counts), half);                             \
    }                                                                                                                 \
    extern "C" void sampled_codes_##NAME(const void *x, int64_t n, int shift, void *counts, int64_t half,             \
                                         uint32_t seed) {                                                             \
        sampled_codes(static_cast<const T *>(x), n, shift, static_cast<int64_t *>(counts), half, seed);               \
    }

EXPORT(float32, float, FLOAT32)
EXPORT(float64, double, FLOAT64)
EXPORT(bfloat16, uint16_t, BFLOAT16)

#define EXPORT_DIFFERENCE(NAME, DTYPE)                                                                                \
    extern "C" void measure_difference_##NAME(const void *x, void *y, int64_t n, int wanted, void *out) {             \
        run(Job{x, y, n, DTYPE, wanted, static_cast<Record *>(out)}, subtract_job);                                   \
    }

EXPORT_DIFFERENCE(float32, FLOAT32)
EXPORT_DIFFERENCE(float64, FLOAT64)
