// Statistics of many numbers, which are read from memory once.
//
// Sums of 1,024 numbers are in their own precision, in 16 lanes; they are added in double, and runs of 4,096 merge in double (Chan,
// Golub & LeVeque 1979; Pebay 2008).  A run whose sums are not finite, or exceed what float can represent, is read again in
// double, and element by element if that does not help.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <type_traits>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif


namespace {

// The statistics to compute, besides the sum of squares and the number of elements: means, second moments and extremes; higher moments.
enum Wanted { LINEAR = 1, HIGHER = 2 };

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
        merge_moments(b, wanted);
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

enum { FLOAT32, FLOAT64, BFLOAT16 };
constexpr int64_t BYTES[] = {4, 8, 2};

// Numbers to measure; `other` is where they are copied to, or what is subtracted from them; `wanted` is -1 for a copy alone.
// If `counts` is not null, their codes are counted there: those of a sample, unless `seed` is negative.
struct Job {
    const void *numbers;
    void *other;
    int64_t n;
    int dtype, wanted;
    Record *row;
    int64_t *counts = nullptr, seed = -1;
    bool is_large = false;  // whether its copy is one of many bytes
};

float widened(float x) { return x; }
double widened(double x) { return x; }
float widened(uint16_t bfloat16) {
    const uint32_t bits = static_cast<uint32_t>(bfloat16) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// What is compiled for several processors.
struct Kernels {
    void (*measure)(const Job &), (*subtract)(const Job &);
    void (*finish)(int64_t *, int64_t);
    void (*draw)(int64_t *, int64_t, int64_t, uint32_t);
};

constexpr int64_t PARTS = 1 << 16, DRAWN = 1024, FAR = 1 << 20;  // above FAR, every drawn number lies in another cache line

#define INLINE inline __attribute__((always_inline))
#pragma GCC diagnostic ignored "-Wpsabi"  // no vector leaves this file

namespace portable {
#define WIDTH 16
#define WIDEN(half) __builtin_convertvector(half, Pack<double>::Vector)
#if defined(__SSE2__)
#define STREAM _mm_stream_ps
#endif
#include "lanes.h"
}  // namespace portable

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_VARIANTS
#pragma GCC push_options
#pragma GCC target("avx2")
namespace avx2 {
#define WIDTH 32
#define STREAM _mm256_stream_ps
#define WIDEN _mm256_cvtps_pd
#include "lanes.h"
}  // namespace avx2
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
namespace avx512 {
#define WIDTH 64
#define STREAM _mm512_stream_ps
#define WIDEN _mm512_cvtps_pd
#include "lanes.h"
}  // namespace avx512
#pragma GCC pop_options
#endif

const Kernels *active = &portable::kernels;

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

// Differences of numbers, rounded as those of two tensors.
template <class T>
struct Differences {
    const T *x, *y;
    auto operator[](int64_t i) const { return widened(x[i]) - widened(y[i]); }
    Differences operator+(int64_t i) const { return {x + i, y + i}; }
};

template <class T> void prefetch(const T *x) { __builtin_prefetch(x, 0, 2); }
template <class T> void prefetch(const Differences<T> &d) { prefetch(d.x), prefetch(d.y); }

// Count sign, exponent and 23 - shift bits of the mantissa of each of at most FULL numbers.
template <class Numbers>
void codes_of_some(Numbers x, int64_t n, int shift, int64_t *counts, int64_t half) {
    begin(counts, half);
    tally(counts, half, n, [=](int64_t i) { return static_cast<int64_t>(bits(x[i]) >> shift); });
    active->finish(counts, half);
}

// The same for any n.
template <class Numbers>
void codes(Numbers x, int64_t n, int shift, int64_t *counts, int64_t half) {
    codes_of_some(x, n < FULL ? n : FULL, shift, counts, half);
    if (n <= FULL) return;
    std::vector<int64_t> more(2 * half);
    for (int64_t first = FULL; first < n; first += FULL) {
        codes_of_some(x + first, n - first < FULL ? n - first : FULL, shift, more.data(), half);
        for (int64_t bin = 0; bin < 2 * half; bin++) counts[bin] += more[bin];
    }
}

// The same for one random number out of each of 2^16 equal parts, which represents its part.
template <class Numbers>
void sampled_codes(Numbers x, int64_t n, int shift, int64_t *counts, int64_t half, uint32_t seed) {
    int64_t at[DRAWN];
    begin(counts, half);
    for (int64_t first = 0; first < PARTS; first += DRAWN) {
        active->draw(at, first, n, seed);
        if (n > FAR) for (const int64_t i : at) prefetch(x + i);
        tally(counts, half, DRAWN, [&](int64_t i) { return static_cast<int64_t>(bits(x[at[i]]) >> shift); });
    }
    active->finish(counts, half);
    const double share = static_cast<double>(n) / PARTS;
    for (int64_t bin = 0; bin < 2 * half; bin++) counts[bin] = static_cast<int64_t>(std::nearbyint(counts[bin] * share));
}

void measure_job(const Job &job) { active->measure(job); }
void subtract_job(const Job &job) { active->subtract(job); }

template <class Numbers>
void count_numbers(const Job &job, Numbers x) {
    constexpr int SHIFT = 20;  // three bits of the mantissa
    constexpr int64_t HALF = 256 << 3;
    if (job.seed < 0) codes(x, job.n, SHIFT, job.counts, HALF);
    else sampled_codes(x, job.n, SHIFT, job.counts, HALF, static_cast<uint32_t>(job.seed));
}

template <class T>
void count_as(const Job &job, bool is_difference) {
    const T *const x = static_cast<const T *>(job.numbers), *const y = static_cast<const T *>(job.other);
    if (is_difference) count_numbers(job, Differences<T>{x, y});
    else count_numbers(job, x);
}

// Count the codes of a job, or of a difference, if that is wanted.
void count_job(const Job &job, bool is_difference) {
    if (!job.counts) return;
    if (job.dtype == FLOAT32) count_as<float>(job, is_difference);
    else if (job.dtype == FLOAT64) count_as<double>(job, is_difference);
    else count_as<uint16_t>(job, is_difference);
}

}  // namespace

// Use the vectors of so many bytes: 64 for AVX-512, 32 for AVX2, 16 for those that each processor has.  Return whether this processor
// has them.
extern "C" int use_vectors(int bytes) {
    const Kernels *found = bytes == 16 ? &portable::kernels : nullptr;
#ifdef HAS_VARIANTS
    if (bytes == 32 && __builtin_cpu_supports("avx2")) found = &avx2::kernels;
    if (bytes == 64 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        found = &avx512::kernels;
#endif
    if (found) active = found;
    return found != nullptr;
}

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
    extern "C" void measure_difference_##NAME(const void *x, void *y, int64_t n, int wanted, void *out) {             \
        run(Job{x, y, n, DTYPE, wanted, static_cast<Record *>(out)}, subtract_job);                                   \
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

// ---- bits -------------------------------------------------------------------------------------------------------------
//
// The sum of BASE^i * x[i] modulo 2^64, see `ikkuna.numerics.bits`: eight polynomials in BASE^8, which do not wait for each other.

namespace {

template <class T>
uint64_t bit_sum(const T *x, int64_t n) {
    constexpr uint64_t BASE = 6364136223846793005u;
    constexpr int LANES = 8;
    uint64_t step = 1, sums[LANES] = {};
    for (int l = 0; l < LANES; l++) step *= BASE;
    const int64_t whole = n / LANES * LANES;
    for (int64_t i = whole; i < n; i++) sums[i - whole] = uint64_t(int64_t(x[i]));
    for (int64_t i = whole - LANES; i >= 0; i -= LANES) {
        for (int l = 0; l < LANES; l++) sums[l] = sums[l] * step + uint64_t(int64_t(x[i + l]));
    }
    uint64_t total = 0;
    for (int l = LANES - 1; l >= 0; l--) total = total * BASE + sums[l];
    return total;
}

}  // namespace

// `x` has `n` words of 1, 2 or 4 bytes.
extern "C" int64_t bit_sum_of_words(const void *x, int64_t n, int bytes) {
    return bytes == 1   ? int64_t(bit_sum(static_cast<const int8_t *>(x), n))
           : bytes == 2 ? int64_t(bit_sum(static_cast<const int16_t *>(x), n))
                        : int64_t(bit_sum(static_cast<const int32_t *>(x), n));
}
