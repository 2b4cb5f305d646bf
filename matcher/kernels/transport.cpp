// Optimal transport between candidates and dustbins: Sinkhorn iterations by stabilised scaling, as in
// matcher/match/sinkhorn.py, on a sparse matrix, and for the other entries one in 16 bits or one of rank one.
#include <algorithm>
#include <vector>

#include "numbers.h"
#include "vectors.h"

namespace {

constexpr float kLimit = 1e12f;  // of scales, beyond which they are moved into the potentials

// The points of one image, and the candidates of each.
struct Side {
  long count;
  const int32_t *starts, *others;
  const float* bins;      // scores of the dustbin
  const float* rests;     // an entry that is no candidate has as score the sum of those of its row and column,
                          // and of the logarithm of its weight where these are given
  float* potentials;      // (count + 1,), the dustbin's last
  float mass;             // of the dustbin
  bool rows;              // of the weights
  std::vector<float> scores, kernel, bin_kernel, rest_kernel, scales, following, others_rest, gathered;
};

float dot(const float* x, const float* y, long count) {
  double sum = 0.0;
#pragma omp simd reduction(+ : sum)
  for (long i = 0; i < count; ++i) sum += (double)x[i] * y[i];
  return (float)sum;
}

// log Σ exp(x + y).
float log_sum(const float* x, const float* y, long count) {
  float top = -INFINITY;
  for (long i = 0; i < count; ++i) top = std::max(top, x[i] + y[i]);
  double sum = 0.0;
  for (long i = 0; i < count; ++i) sum += bounded_exponential(x[i] + y[i] - top);
  return top + (float)std::log(sum);
}

// By itself: within a parallel region the compiler leaves such a sum to one lane.
float weigh(const Half* weights, const float* x, long count) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (long j = 0; j < count; ++j) sum += wide(weights[j]) * x[j];
  return sum;
}

struct Transport {
  Side first, second;  // `first` is updated first
  const Half* weights;  // of the entries that are no candidates, 0 for those that are; or null, and all are 1
  float corner, corner_kernel;
  int threads;

  // Σ weights · `given` over the other side, for every point of this one.
  void gather(Side& side, const std::vector<float>& given) {
    const long width = side.rows ? (long)given.size() : side.count, height = side.rows ? side.count : (long)given.size();
    float* out = side.gathered.data();
    if (!weights) {
      double sum = 0.0;
      for (float x : given) sum += x;
      std::fill_n(out, side.count, (float)sum);
    } else if (side.rows) {
#pragma omp parallel for num_threads(threads) schedule(static)
      for (long i = 0; i < height; ++i) out[i] = weigh(weights + i * width, given.data(), width);
    } else {
#pragma omp parallel for num_threads(threads) schedule(static)
      for (int t = 0; t < threads; ++t) {
        const long from = width * t / threads, to = width * (t + 1) / threads;
        std::fill(out + from, out + to, 0.0f);
        for (long i = 0; i < height; ++i) {
          const Half* row = weights + i * width;
          const float x = given[i];
#pragma omp simd
          for (long j = from; j < to; ++j) out[j] += wide(row[j]) * x;
        }
      }
    }
  }

  // `shift` is added to the potentials for the rests, whose product stays the same.
  void absorb(Side& side, const Side& other, float shift) {
    const float bin = other.potentials[other.count];
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < side.count; ++i) {
      const float own = side.potentials[i];
      side.bin_kernel[i] = bounded_exponential(side.bins[i] + own + bin);
      side.rest_kernel[i] = bounded_exponential(side.rests[i] + own + shift);
#pragma omp simd
      for (long e = side.starts[i]; e < side.starts[i + 1]; ++e)
        side.kernel[e] = bounded_exponential(side.scores[e] + own + other.potentials[side.others[e]]);
    }
  }

  void absorb() {
    const float shift = second.potentials[second.count];
    absorb(first, second, shift);
    absorb(second, first, -shift);
    corner_kernel = bounded_exponential(corner + first.potentials[first.count] + second.potentials[second.count]);
    std::fill(first.scales.begin(), first.scales.end(), 1.0f);
    std::fill(second.scales.begin(), second.scales.end(), 1.0f);
  }

  void update(Side& side, const Side& other, const float* scales, float* out) {
    const float bin = scales[other.count];
    for (long j = 0; j < other.count; ++j) side.others_rest[j] = other.rest_kernel[j] * scales[j];
    gather(side, side.others_rest);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < side.count; ++i) {
      float sum = side.bin_kernel[i] * bin + side.rest_kernel[i] * side.gathered[i];
#pragma omp simd reduction(+ : sum)
      for (long e = side.starts[i]; e < side.starts[i + 1]; ++e) sum += side.kernel[e] * scales[side.others[e]];
      out[i] = 1.0f / sum;
    }
    const float last = dot(other.bin_kernel.data(), scales, other.count) + corner_kernel * bin;
    out[side.count] = side.mass / last;
  }

  void iterate() {
    update(first, second, second.scales.data(), first.following.data());
    update(second, first, first.following.data(), second.following.data());
  }

  // One update of a side's potentials in the log domain, to those of the other.
  void log_update(Side& side, const Side& other) {
    const float bin = other.potentials[other.count];
    float most = -INFINITY;
    for (long j = 0; j < other.count; ++j) most = std::max(most, other.rests[j] + other.potentials[j]);
    for (long j = 0; j < other.count; ++j)
      side.others_rest[j] = bounded_exponential(other.rests[j] + other.potentials[j] - most);
    gather(side, side.others_rest);
    for (long i = 0; i < side.count; ++i) {
      const float rest = most + std::log(std::max(side.gathered[i], 1e-30f));
      float top = std::max(side.bins[i] + bin, side.rests[i] + rest);
      for (long e = side.starts[i]; e < side.starts[i + 1]; ++e)
        top = std::max(top, side.scores[e] + other.potentials[side.others[e]]);
      float sum = bounded_exponential(side.bins[i] + bin - top) + bounded_exponential(side.rests[i] + rest - top);
      for (long e = side.starts[i]; e < side.starts[i + 1]; ++e)
        sum += bounded_exponential(side.scores[e] + other.potentials[side.others[e]] - top);
      side.potentials[i] = -top - std::log(sum);
    }
    const float bins = log_sum(other.bins, other.potentials, other.count), top = std::max(corner + bin, bins);
    const float sum = bounded_exponential(corner + bin - top) + bounded_exponential(bins - top);
    side.potentials[side.count] = std::log(side.mass) - top - std::log(sum);
  }

  // Begin with rows of maximum 1.
  void begin() {
    std::fill_n(second.potentials, second.count + 1, 0.0f);
    for (long i = 0; i < first.count; ++i) {
      float top = first.bins[i];
      for (long e = first.starts[i]; e < first.starts[i + 1]; ++e) top = std::max(top, first.scores[e]);
      first.potentials[i] = -top;
    }
    first.potentials[first.count] = -std::max(corner, *std::max_element(second.bins, second.bins + second.count));
  }

  bool within(float limit) const {
    for (const Side* side : {&first, &second})
      for (float x : side->scales)
        if (!(x > 1.0f / limit && x < limit)) return false;
    return true;
  }

  // Scales beyond the limit: this update again in the log domain, from the potentials absorbed last.
  void restart() {
    for (long j = 0; j <= second.count; ++j) {
      const float x = second.scales[j];
      second.potentials[j] += std::isnan(x) ? 0.0f : std::log(std::min(std::max(x, 1.0f / kLimit), kLimit));
    }
    log_update(first, second);
    log_update(second, first);
    absorb();
  }

  // How far the rows of the plan are from their masses (`row_error` in Python).
  float error() const {
    double squares = 0.0;
    for (long i = 0; i < first.count; ++i) {
      const double off = first.scales[i] / first.following[i] - 1.0f;
      squares += off * off;
    }
    const float bin = std::abs(first.scales[first.count] / first.following[first.count] - 1.0f);
    return std::max((float)std::sqrt(squares / first.count), bin);
  }

  bool solve(long most, float tolerance, long& iterations) {
    absorb();
    iterate();
    first.scales = first.following, second.scales = second.following;
    iterations = 1;
    bool converged = false;
    while (true) {
      if (!within(kLimit)) restart();
      iterate();
      converged = error() <= tolerance;
      if (converged || iterations >= most) break;
      first.scales.swap(first.following);
      second.scales.swap(second.following);
      ++iterations;
    }
    for (Side* side : {&first, &second})
      for (long i = 0; i <= side->count; ++i) side->potentials[i] += std::log(side->scales[i]);
    return converged;
  }
};

}  // namespace

// Dual potentials u (n + 1), v (m + 1) of candidates with dustbins: log P = scores + u + v. Candidates as
// `matcher_join` orders them, scores in that order; entries that are none have the scores rests0 (n) + rests1 (m),
// summed over all rows or columns, and of the logarithm of their weight where `weights` (n, m) are not null; `begun`: u
// and v hold potentials to begin with; `turned`: the
// columns are updated first. `iterations` is how many were needed. Returns whether the error fell to `tolerance`.
extern "C" int matcher_transport(long n, long m, const int32_t* starts, const int32_t* others,
                                 const int32_t* turned_starts, const int32_t* turned_others, const int32_t* order,
                                 const float* scores, const float* bins0, const float* bins1, const float* rests0,
                                 const float* rests1, const Half* weights, float corner, float* u, float* v, int begun,
                                 int turned, long most, float tolerance, long* iterations, int threads) {
  const long count = starts[n];
  Side rows{n, starts, others, bins0, rests0, u, (float)m, true};
  Side columns{m, turned_starts, turned_others, bins1, rests1, v, (float)n, false};
  rows.scores.assign(scores, scores + count);
  columns.scores.resize(count);
  for (long e = 0; e < count; ++e) columns.scores[e] = scores[order[e]];
  for (Side* side : {&rows, &columns}) {
    side->kernel.resize(count);
    side->bin_kernel.resize(side->count);
    side->rest_kernel.resize(side->count);
    side->scales.resize(side->count + 1);
    side->following.resize(side->count + 1);
    side->others_rest.resize(n + m - side->count);
    side->gathered.resize(side->count);
  }
  Transport problem{turned ? std::move(columns) : std::move(rows), turned ? std::move(rows) : std::move(columns),
                    weights, corner, 0.0f, threads};
  if (!begun) problem.begin();
  return problem.solve(most, tolerance, *iterations);
}

// The best candidate of every row under log P = scores + u + v: its log probability and column, and whether no row
// before or better has the same (n). Rows without candidates have −∞ and column 0.
extern "C" void matcher_best(long n, long m, const int32_t* starts, const int32_t* others, const float* scores,
                             const float* u, const float* v, float* best, int64_t* partners, uint8_t* mutual) {
  std::vector<float> top(m, -INFINITY);
  std::vector<int64_t> owner(m, -1);
  for (long i = 0; i < n; ++i) {
    float most = -INFINITY;
    int64_t partner = 0;
    for (long e = starts[i]; e < starts[i + 1]; ++e) {
      const float x = u[i] + scores[e] + v[others[e]];
      if (x > most) most = x, partner = others[e];
      if (x > top[others[e]]) top[others[e]] = x, owner[others[e]] = i;
    }
    best[i] = most, partners[i] = partner;
  }
  for (long i = 0; i < n; ++i) mutual[i] = owner[partners[i]] == i && best[i] > -INFINITY;
}

// Candidates (n, m) with what both images' neighbours say of them: scores + Σ (height / (1 + d² / tolerance) −
// penalty), d the distance from the predicted position to the candidate's. Per point x, y predicted, 1 / tolerance,
// height, penalty (n, 5), (m, 5); positions (n, 2), (m, 2).
extern "C" void matcher_support(long n, const int32_t* starts, const int32_t* others, const float* scores,
                                const float* priors0, const float* priors1, const float* positions0,
                                const float* positions1, float* out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long i = 0; i < n; ++i) {
    const float *own = priors0 + 5 * i, *here = positions0 + 2 * i;
#pragma omp simd
    for (long e = starts[i]; e < starts[i + 1]; ++e) {
      const float *other = priors1 + 5 * others[e], *there = positions1 + 2 * others[e];
      const float x0 = there[0] - own[0], y0 = there[1] - own[1], x1 = here[0] - other[0], y1 = here[1] - other[1];
      out[e] = scores[e] + own[3] / (1.0f + (x0 * x0 + y0 * y0) * own[2]) +
               other[3] / (1.0f + (x1 * x1 + y1 * y1) * other[2]) - own[4] - other[4];
    }
  }
}
