
// ---- quantiles and buckets of histograms by float codes ----------------------------------------------------------------
//
// These are the operations of `Bins` in `histogram.py`, in the same order, so that both return the same numbers.

namespace {

// Sets of numbers: their counts; the least and the greatest number that each bin can hold; their extrema, as far as they are finite.
// The bins from `begin` to `end` count; those before `nans_below` and behind `nans_above` hold NaN.
struct Sets {
    const int64_t *const *counts;
    const double *low, *high, *min, *max;
    int64_t count, begin, end, nans_below, nans_above;
};

struct Bin {
    int64_t code, before, count;
};

// The extrema of a set, which make its outermost bins exact.
struct Extrema {
    const Sets &all;
    double least, most;

    Extrema(const Sets &all, int64_t i) : all(all), least(all.min[i]), most(all.max[i]) {
        const double infinity = std::numeric_limits<double>::infinity();
        if (!std::isfinite(least)) least = -infinity;
        if (!std::isfinite(most)) most = infinity;
    }

    double clipped(double bound) const {  // an extremum of 0 keeps its sign, as in numpy
        const double upper = bound > least ? bound : least;
        return upper < most ? upper : most;
    }

    void bounds(int64_t code, double &low, double &high) const {
        low = all.low[code], high = all.high[code];
        if (std::isfinite(low) && std::isfinite(high)) low = clipped(low), high = clipped(high);
    }
};

// One set: its bins that are not empty.
struct Bins : Extrema {
    std::vector<Bin> &held;
    int64_t total = 0;

    Bins(const Sets &all, int64_t i, std::vector<Bin> &memory) : Extrema(all, i), held(memory) {
        held.clear();
        const int64_t *const counts = all.counts[i];
        for (int64_t code = all.begin; code < all.end; code++)
            if (counts[code]) held.push_back({code, total, counts[code]}), total += counts[code];
    }

    bool has_nans() const { return total && (held.front().code < all.nans_below || held.back().code > all.nans_above); }

    // The number at a rank; the elements of a bin are spread evenly over it.
    double at(double rank) const {
        const auto bin = std::upper_bound(held.begin(), held.end(), rank, [](double r, const Bin &b) { return r < b.before + b.count; });
        double low, high;
        bounds(bin->code, low, high);
        const double inside = (rank - bin->before + 0.5) / bin->count;
        double value = low == high ? low : low + inside * (high - low);
        if (std::isfinite(least) && rank == 0 && std::isfinite(value)) value = least;
        if (std::isfinite(most) && rank == total - 1 && std::isfinite(value)) value = most;
        return value;
    }

    double quantile(double q) const {
        const double rank = (total - 1) * q, whole = std::floor(rank);
        const double below = at(whole), above = at(std::ceil(rank));
        return below + (above == below ? 0.0 : (above - below) * (rank - whole));
    }

    // The numbers of elements in buckets that end at `limits`.
    void fill(const double *limits, int64_t n, double *shares) const {
        size_t bin = 0;
        double before = 0;
        for (int64_t i = 0; i < n; i++) {
            while (bin + 1 < held.size() && all.low[held[bin + 1].code] <= limits[i]) bin++;
            double low, high;
            bounds(held[bin].code, low, high);
            const double share = limits[i] < low ? 0.0 : high > low ? std::min((limits[i] - low) / (high - low), 1.0) : 1.0;
            const double counted = i == n - 1 ? total : held[bin].before + share * held[bin].count;
            shares[i] = counted - before, before = counted;
        }
    }
};

template <class Do>
bool for_each_set(const Sets &sets, Do do_one) {
    std::vector<Bin> memory;
    if (!reserve(memory, sets.end - sets.begin)) return false;
    for (int64_t i = 0; i < sets.count; i++) do_one(i, Bins(sets, i, memory));
    return true;
}

}  // namespace

// Write the quantiles (sets, n); return whether there was memory.
extern "C" int quantiles(const void *sets, const double *q, int64_t n, double *out) {
    return for_each_set(*static_cast<const Sets *>(sets), [=](int64_t i, const Bins &bins) {
        const bool is_known = bins.total && !bins.has_nans();
        for (int64_t j = 0; j < n; j++) out[i * n + j] = is_known ? bins.quantile(q[j]) : std::numeric_limits<double>::quiet_NaN();
    });
}

// Write the right edges of n buckets at `fractions` of the range of each set, and their counts (sets, n); the number of elements, and
// the left edge of the first bucket.  Mark the bins that any set holds.
extern "C" int buckets(const void *sets, const double *fractions, int64_t n, double *limits, double *shares, int64_t *totals,
                       double *begins, uint8_t *is_held) {
    return for_each_set(*static_cast<const Sets *>(sets), [=](int64_t i, const Bins &bins) {
        totals[i] = bins.total;
        for (const Bin &bin : bins.held) is_held[bin.code] = 1;
        if (!bins.total) return;
        double least, most, other;
        bins.bounds(bins.held.front().code, least, other);
        bins.bounds(bins.held.back().code, other, most);
        if (std::isfinite(bins.least)) least = bins.least;
        if (std::isfinite(bins.most)) most = bins.most;
        double *const edges = limits + i * n;
        for (int64_t j = 0; j < n; j++) edges[j] = least + fractions[j] * (most - least);
        begins[i] = least, edges[n - 1] = most;
        bins.fill(edges, n, shares + i * n);
    });
}

// Write the sum of the elements of each bin that is held, and of their squares, all in the middle of their bin (sets, bins).
extern "C" void weigh(const void *sets, const uint8_t *is_held, double *sums, double *squares) {
    const Sets &all = *static_cast<const Sets *>(sets);
    for (int64_t i = 0; i < all.count; i++) {
        const Extrema extrema(all, i);
        for (int64_t code = all.begin; code < all.end; code++) {
            if (!is_held[code]) continue;
            double low, high;
            extrema.bounds(code, low, high);
            const double middle = (low + high) / 2;
            *sums = all.counts[i][code] * middle;
            *squares++ = *sums++ * middle;
        }
    }
}
