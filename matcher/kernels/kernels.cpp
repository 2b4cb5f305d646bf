// The kernels of `matcher/kernels/calls.py`, where their references are: attention, local affine maps, and least-squares
// matching of windows.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AVX2__
#include <immintrin.h>
#endif

// --- Softmax attention by vector units, some keys at a time with a running maximum and sum (Milakov and Gimelshein 2018),
// so that scores never leave the cache: in float32, or by dot products of pairs in bfloat16 where a processor has them.

namespace attention {
namespace {

// Numbers of rows: float32, or bfloat16, which is the upper half of one.
struct Half {
  uint16_t bits;
};

inline float as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

inline uint32_t as_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

inline float wide(float x) { return x; }
inline float wide(Half x) { return as_float((uint32_t)x.bits << 16); }

// The upper half of the bits of x, rounded to the nearest, ties to even.
inline uint32_t rounded(float x) {
  const uint32_t bits = as_bits(x);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline void store(float x, float* out) { *out = x; }
inline void store(float x, Half* out) { out->bits = (uint16_t)rounded(x); }

// Vectors as wide as the target's registers, by the compiler's extensions, and the exponential.
#if defined(__AVX512F__)
constexpr long kLanes = 16, kTileRows = 8;
#elif defined(__AVX__)
constexpr long kLanes = 8, kTileRows = 6;
#else
constexpr long kLanes = 4, kTileRows = 8;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

inline Floats load(const float* x) { return *(const Floats*)x; }
inline void store(Floats x, float* to) { *(Floats*)to = x; }

// e^x for |x| ≤ 87, to a relative error of 3e-7.
inline float exponential(float x) {
  const float n = __builtin_rintf(x * 1.44269504f);
  const float f = x - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * f + 1.0f / 720;
  p = p * f + 1.0f / 120;
  p = p * f + 1.0f / 24;
  p = p * f + 1.0f / 6;
  p = p * f + 0.5f;
  p = p * f + 1.0f;
  p = p * f + 1.0f;
  const uint32_t power = (uint32_t)((int32_t)n + 127) << 23;
  float scale;
  memcpy(&scale, &power, 4);
  return p * scale;
}

constexpr long kQueries = 24;  // a multiple of every `kTileRows`
constexpr long kPanel = 2 * kLanes;
constexpr long kWidest = 128;
constexpr float kSmall = 60.0f;  // exponentials of such scores, their sums and those of values are ordinary numbers
constexpr float kSlack = 8.0f;   // by which a maximum may grow before weights are made relative to it

template <typename Number>
struct Rows {  // heads of `width` channels: head h of row i begins at first + i * row + h * head
  const Number* first;
  long count, row, head;
  const Number* at(long h, long i) const { return first + i * row + h * head; }

  // Row i of head h, as wide numbers, its pairs of channels turned where there are cosines and sines, (2, width) a row.
  void read(long h, long i, long width, const float* turns, float* out) const {
    const Number* from = at(h, i);
    if (!turns) {
      for (long c = 0; c < width; ++c) out[c] = wide(from[c]);
      return;
    }
    const long half = width / 2;
    const float *cos = turns + 2 * width * i, *sin = cos + width;
    for (long c = 0; c < half; ++c) {
      const float x = wide(from[c]), y = wide(from[c + half]);
      out[c] = x * cos[c] + y * sin[c];
      out[c + half] = y * cos[c + half] + x * sin[c + half];
    }
  }
};

// Arithmetic on floats. `weights_of` makes weights e^(score scale - most) of `kPanel` scores, 0 beyond the first `count`, and
// adds them, as they were rounded, to sums, lane by lane.
struct Whole {
  typedef float Element;
  static constexpr long kEach = 1;   // numbers of an element
  static constexpr long kKeys = 64;  // at a time, a multiple of every panel; they stay in the innermost cache
  static Element pack(float first, float) { return first; }

  static void weights_of(const float* row, float scale, float most, long count, Element* out, float* sums) {
#pragma omp simd
    for (long j = 0; j < kPanel; ++j) {
      const float x = row[j] * scale - most;
      out[j] = exponential(x < -80.0f ? -80.0f : x);
    }
    for (long j = std::max(count, 0L); j < kPanel; ++j) out[j] = 0.0f;
    for (long j = 0; j < kPanel; j += kLanes) store(load(sums) + load(out + j), sums);
  }

  template <long kRows>
  static void tile(const Element* left, long stride, const Element* panel, long count, float* out, long out_stride,
                   bool add) {
    Floats sums[kRows][2];
    for (long r = 0; r < kRows; ++r)
      for (long s = 0; s < 2; ++s) sums[r][s] = add ? load(out + r * out_stride + s * kLanes) : Floats{};
    for (long c = 0; c < count; ++c, panel += kPanel) {
      const Floats first = load(panel), second = load(panel + kLanes);
#pragma GCC unroll 8
      for (long r = 0; r < kRows; ++r) {
        const float x = left[r * stride + c];
        sums[r][0] += x * first;
        sums[r][1] += x * second;
      }
    }
    for (long r = 0; r < kRows; ++r)
      for (long s = 0; s < 2; ++s) store(sums[r][s], out + r * out_stride + s * kLanes);
  }
};

#ifdef __AVX512BF16__
// Arithmetic on pairs of numbers in bfloat16.
struct Pairs {
  typedef uint32_t Element;
  static constexpr long kEach = 2, kKeys = 128;
  static Element pack(float first, float second) { return rounded(first) | rounded(second) << 16; }

  // To a relative error of 7.5e-5, a fiftieth of a step of bfloat16.
  static __m512 exponential_of(__m512 x, float scale, float most) {
    x = _mm512_fmsub_ps(x, _mm512_set1_ps(scale * 1.44269504f), _mm512_set1_ps(most * 1.44269504f));
    const __m512 n = _mm512_floor_ps(x), f = x - n;
    return _mm512_scalef_ps(((0.07802452f * f + 0.22606716f) * f + 0.69583354f) * f + 0.99992522f, n);
  }

  static void weights_of(const float* row, float scale, float most, long count, Element* out, float* sums) {
    const uint32_t valid = count >= kPanel ? ~0u : count <= 0 ? 0u : (1u << count) - 1;
    const __m512 first = _mm512_maskz_mov_ps(valid, exponential_of(_mm512_loadu_ps(row), scale, most));
    const __m512 second = _mm512_maskz_mov_ps(valid >> kLanes, exponential_of(_mm512_loadu_ps(row + kLanes), scale, most));
    const __m512bh both = _mm512_cvtne2ps_pbh(second, first), ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    _mm512_storeu_si512(out, (__m512i)both);
    _mm512_storeu_ps(sums, _mm512_dpbf16_ps(_mm512_loadu_ps(sums), both, ones));
  }

  template <long kRows>
  static void tile(const Element* left, long stride, const Element* panel, long count, float* out, long out_stride,
                   bool add) {
    __m512 sums[kRows][2];
    for (long r = 0; r < kRows; ++r)
      for (long s = 0; s < 2; ++s)
        sums[r][s] = add ? _mm512_loadu_ps(out + r * out_stride + s * kLanes) : _mm512_setzero_ps();
    for (long c = 0; c < count; ++c, panel += kPanel) {
      const __m512bh first = (__m512bh)_mm512_loadu_si512(panel), second = (__m512bh)_mm512_loadu_si512(panel + kLanes);
#pragma GCC unroll 8
      for (long r = 0; r < kRows; ++r) {
        const __m512bh x = (__m512bh)_mm512_set1_epi32((int)left[r * stride + c]);
        sums[r][0] = _mm512_dpbf16_ps(sums[r][0], x, first);
        sums[r][1] = _mm512_dpbf16_ps(sums[r][1], x, second);
      }
    }
    for (long r = 0; r < kRows; ++r)
      for (long s = 0; s < 2; ++s) _mm512_storeu_ps(out + r * out_stride + s * kLanes, sums[r][s]);
  }
};
#endif

template <typename Arithmetic>
void multiply(const typename Arithmetic::Element* left, long stride, const typename Arithmetic::Element* panel,
              long count, float* out, long out_stride, bool add) {
  for (long r = 0; r < kQueries; r += kTileRows)
    Arithmetic::template tile<kTileRows>(left + r * stride, stride, panel, count, out + r * out_stride, out_stride, add);
}

// Keys as panels of `kPanel` of them, each channel by channel; beyond the last key zeros.
template <typename Arithmetic, typename Number>
void pack_keys(const Rows<Number>& k, long h, long padded, long width, const float* turns, typename Arithmetic::Element* out) {
  float key[kWidest];
  for (long j = 0; j < padded; j += kPanel, out += width / Arithmetic::kEach * kPanel)
    for (long n = 0; n < kPanel && j + n < k.count; ++n) {
      k.read(h, j + n, width, turns, key);
      for (long c = 0; c < width; c += Arithmetic::kEach)
        out[c / Arithmetic::kEach * kPanel + n] = Arithmetic::pack(key[c], key[c + Arithmetic::kEach - 1]);
    }
}

// Values as panels of `kPanel` channels, each key by key.
template <typename Arithmetic, typename Number>
void pack_values(const Rows<Number>& v, long h, long padded, long width, typename Arithmetic::Element* out) {
  const long each = Arithmetic::kEach;
  for (long first = 0; first < width; first += kPanel, out += padded / each * kPanel)
    for (long j = 0; j < v.count; j += each)
      for (long c = 0; c < kPanel; ++c) {
        const float last = j + each - 1 < v.count ? wide(v.at(h, j + each - 1)[first + c]) : 0.0f;
        out[j / each * kPanel + c] = Arithmetic::pack(wide(v.at(h, j)[first + c]), last);
      }
}

struct Running {  // of each query
  float most[kQueries];  // what weights are relative to
  float sums[kQueries][kLanes];  // of the weights, lane by lane: to add up lanes is slow
};

// Scores (kQueries, kKeys), of which the last beyond `keys` do not count, become weights. Those of large scores are relative
// to about the maximum so far; what was summed before is brought to it.
template <typename Arithmetic>
void weigh(const float* scores, long keys, float scale, bool small, long width, Running& running, float* message,
           typename Arithmetic::Element* weights) {
  constexpr long kKeys = Arithmetic::kKeys;
  for (long r = 0; r < kQueries; ++r) {
    const float* row = scores + r * kKeys;
    if (!small) {
      float most = -INFINITY;
#pragma omp simd reduction(max : most)
      for (long j = 0; j < keys; ++j) most = row[j] > most ? row[j] : most;
      most *= scale;
      if (most > running.most[r] + kSlack) {
        const float before = running.most[r] - most, share = before < -80.0f ? 0.0f : exponential(before);
        running.most[r] = most;
        store(load(running.sums[r]) * share, running.sums[r]);
        for (long c = 0; c < width; c += kLanes) store(load(message + r * width + c) * share, message + r * width + c);
      }
    }
    for (long j = 0; j < kKeys; j += kPanel)
      Arithmetic::weights_of(row + j, scale, running.most[r], keys - j, weights + (r * kKeys + j) / Arithmetic::kEach,
                             running.sums[r]);
  }
}

// The greatest squared length of the rows of a head; not a number, or infinite, if one is.
template <typename Number>
float longest(const Rows<Number>& x, long h, long width) {
  float most = 0.0f;
  for (long i = 0; i < x.count; ++i) {
    const Number* row = x.at(h, i);
    Floats lanes = {};
    for (long c = 0; c < width; c += kLanes) {
      float part[kLanes];
      for (long l = 0; l < kLanes; ++l) part[l] = wide(row[c + l]);
      lanes += load(part) * load(part);
    }
    float length = 0.0f;
    for (long l = 0; l < kLanes; ++l) length += lanes[l];
    if (!(length <= most)) most = length;
    if (std::isnan(length)) return length;
  }
  return most;
}

template <typename Arithmetic, typename Number>
void attend(const Rows<Number>& q, const Rows<Number>& k, const Rows<Number>& v, Number* out, long heads, long width,
            float gain, const float* turns, int threads) {
  typedef typename Arithmetic::Element Element;
  constexpr long kKeys = Arithmetic::kKeys;
  const long each = Arithmetic::kEach, padded = (k.count + kKeys - 1) / kKeys * kKeys;
  const long blocks = (q.count + kQueries - 1) / kQueries, packed = padded * width / each;
  const float scale = gain / std::sqrt((float)width);
  std::vector<Element> keys(heads * packed), values(heads * packed);
  std::vector<char> small(heads);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (long h = 0; h < heads; ++h) {
      pack_keys<Arithmetic>(k, h, padded, width, turns, keys.data() + h * packed);
      pack_values<Arithmetic>(v, h, padded, width, values.data() + h * packed);
      small[h] = std::sqrt(longest(q, h, width)) * std::sqrt(longest(k, h, width)) * std::fabs(scale) < kSmall;
    }
    alignas(64) Element query[kQueries * kWidest], weights[kQueries * kKeys];
    alignas(64) float scores[kQueries * kKeys], message[kQueries * kWidest];
#pragma omp for schedule(static)
    for (long task = 0; task < heads * blocks; ++task) {
      const long h = task / blocks, first = task % blocks * kQueries, rows = std::min(kQueries, q.count - first);
      for (long r = 0; r < kQueries; ++r) {
        float from[kWidest];
        q.read(h, first + std::min(r, rows - 1), width, turns, from);
        for (long c = 0; c < width; c += each) query[(r * width + c) / each] = Arithmetic::pack(from[c], from[c + each - 1]);
      }
      Running running;
      std::fill_n(running.most, kQueries, small[h] ? 0.0f : -INFINITY);
      memset(running.sums, 0, sizeof running.sums);
      std::fill_n(message, kQueries * width, 0.0f);
      for (long j = 0; j < padded; j += kKeys) {
        for (long p = 0; p < kKeys; p += kPanel)
          multiply<Arithmetic>(query, width / each, keys.data() + h * packed + (j + p) * width / each, width / each,
                               scores + p, kKeys, false);
        weigh<Arithmetic>(scores, std::min(kKeys, k.count - j), scale, small[h], width, running, message, weights);
        for (long c = 0; c < width; c += kPanel)
          multiply<Arithmetic>(weights, kKeys / each, values.data() + h * packed + (c * padded + j * kPanel) / each,
                               kKeys / each, message + c, width, true);
      }
      for (long r = 0; r < rows; ++r) {
        float sum = 0.0f;
        for (float x : running.sums[r]) sum += x;
        const float share = 1.0f / sum;
        Number* target = out + ((first + r) * heads + h) * width;
        for (long c = 0; c < width; ++c) store(message[r * width + c] * share, target + c);
      }
    }
  }
}

template <typename Arithmetic, typename Number>
void attend_rows(const void* q, const void* k, const void* v, void* out, const long* strides, long n, long m,
                 long heads, long width, float gain, const float* turns, int threads) {
  const Rows<Number> queries{(const Number*)q, n, strides[0], strides[1]}, keys{(const Number*)k, m, strides[2], strides[3]};
  const Rows<Number> values{(const Number*)v, m, strides[4], strides[5]};
  attend<Arithmetic>(queries, keys, values, (Number*)out, heads, width, gain, turns, threads);
}

}  // namespace
}  // namespace attention


// out[h, i] = Σ_j exp(q_i · k_j gain / √width) v_j / Σ_j exp(…), for heads of `width` channels, a multiple of 32, of at
// most 128; `half`: all are bfloat16, else float32. Strides of rows and heads of q, k and v; out (n, heads, width). Where
// `turns` is not null, rows of q and of k are rotated by its rows first.
extern "C" void matcher_attend(const void* q, const void* k, const void* v, void* out, const long* strides, int half, long n,
                               long m, long heads, long width, float gain, const float* turns, int threads) {
#ifdef __AVX512BF16__
  typedef attention::Pairs Fast;
#else
  typedef attention::Whole Fast;
#endif
  if (half)
    attention::attend_rows<Fast, attention::Half>(q, k, v, out, strides, n, m, heads, width, gain, turns, threads);
  else
    attention::attend_rows<attention::Whole, float>(q, k, v, out, strides, n, m, heads, width, gain, turns, threads);
}

// --- Affine maps fitted around points to the matches nearest to them; `fit_local_maps` in `matcher/match/consensus.py` does
// the same by stock operators and explains it. Neighbours are sought point by point, maps fitted for some points at once.

namespace maps {
namespace {

constexpr long kNeighbours = 16, kPoints = 16, kColumns = 64;
constexpr float kScales[] = {0.2f, 0.08f, 0.03f, 0.015f};
constexpr float kRidge = 1e-3f, kTiny = 1e-6f, kFar = 1e6f;
typedef float Plane[kNeighbours][kPoints];  // of each neighbour of each point

struct Matches {  // those with confidence; beyond the last, up to a multiple of `kColumns`, far ones
  std::vector<float> place[2], target[2], confidence;
  std::vector<long> owner;  // the match of a point
  long count = 0;

  Matches(const float* positions, const float* targets, const float* given, long n) : owner(n, -1) {
    for (long i = 0; i < n; ++i)
      if (given[i] > 0) {
        owner[i] = count++;
        confidence.push_back(given[i]);
        for (int c = 0; c < 2; ++c) place[c].push_back(positions[2 * i + c]), target[c].push_back(targets[2 * i + c]);
      }
    for (int c = 0; c < 2; ++c) place[c].resize((count + kColumns - 1) / kColumns * kColumns, kFar);
  }
};

// The matches nearest to a point, its own left out, in any order; returns how many.
long nearest(const Matches& matches, float x, float y, long own, float* distances, uint8_t* near, long* found) {
  const long size = (long)matches.place[0].size();
  const float *px = matches.place[0].data(), *py = matches.place[1].data();
  float least[kColumns];
  std::fill_n(least, kColumns, INFINITY);
  for (long j = 0; j < size; j += kColumns)
#pragma omp simd
    for (long c = 0; c < kColumns; ++c) {
      const float dx = px[j + c] - x, dy = py[j + c] - y;
      distances[j + c] = dx * dx + dy * dy;
      least[c] = distances[j + c] < least[c] && j + c != own ? distances[j + c] : least[c];
    }
  if (own >= 0) distances[own] = INFINITY;
  // The nearest lie no farther than the last of as many columns' nearest.
  std::nth_element(least, least + kNeighbours - 1, least + kColumns);
  const float bound = std::min(least[kNeighbours - 1], kFar);
#pragma omp simd
  for (long j = 0; j < size; ++j) near[j] = distances[j] <= bound;
  long count = 0;
  for (long j = 0; j < size; j += 8) {
    uint64_t some;
    memcpy(&some, near + j, 8);
    for (long k = j; some && k < j + 8; ++k)
      if (near[k]) found[count++] = k;
  }
  if (count > kNeighbours)
    std::nth_element(found, found + kNeighbours, found + count, [&](long a, long b) { return distances[a] < distances[b]; });
  return std::min(count, kNeighbours);
}

struct Neighbours {  // of some points: steps from the point in units of its reach, targets, weights without residuals
  Plane x[2], y[2], base;
};

// y ≈ A x + b, robustly; out: what it predicts at x = 0, the sum of the weights, the weighted root mean square residual.
void fit(Neighbours& near, float (*out)[kPoints]) {
  float centre[4][kPoints] = {}, total[kPoints] = {}, slope[2][2][kPoints], predicted[2][kPoints];
  Plane *planes[4] = {&near.x[0], &near.x[1], &near.y[0], &near.y[1]}, weight, square;
  for (long k = 0; k < kNeighbours; ++k)
#pragma omp simd
    for (long p = 0; p < kPoints; ++p) total[p] += near.base[k][p];
  for (int c = 0; c < 4; ++c) {  // about which the sums do not cancel
    for (long k = 0; k < kNeighbours; ++k)
#pragma omp simd
      for (long p = 0; p < kPoints; ++p) centre[c][p] += near.base[k][p] * (*planes[c])[k][p];
#pragma omp simd
    for (long p = 0; p < kPoints; ++p) centre[c][p] /= total[p] + kTiny;
    for (long k = 0; k < kNeighbours; ++k)
#pragma omp simd
      for (long p = 0; p < kPoints; ++p) (*planes[c])[k][p] -= centre[c][p];
  }
  memcpy(weight, near.base, sizeof weight);
  for (const float scale : kScales) {
    float sum[kPoints] = {}, mean[4][kPoints] = {}, own[2][kPoints] = {}, both[kPoints] = {}, along[2][2][kPoints] = {};
    for (long k = 0; k < kNeighbours; ++k)
#pragma omp simd
      for (long p = 0; p < kPoints; ++p) {
        const float w = weight[k][p], x0 = near.x[0][k][p], x1 = near.x[1][k][p], y0 = near.y[0][k][p], y1 = near.y[1][k][p];
        sum[p] += w;
        mean[0][p] += w * x0, mean[1][p] += w * x1, mean[2][p] += w * y0, mean[3][p] += w * y1;
        own[0][p] += w * x0 * x0, own[1][p] += w * x1 * x1, both[p] += w * x0 * x1;
        along[0][0][p] += w * x0 * y0, along[0][1][p] += w * x0 * y1;
        along[1][0][p] += w * x1 * y0, along[1][1][p] += w * x1 * y1;
      }
#pragma omp simd
    for (long p = 0; p < kPoints; ++p) {
      const float share = 1 / (sum[p] + kTiny), m0 = mean[0][p] * share, m1 = mean[1][p] * share;
      const float xx0 = own[0][p] * share + kRidge - m0 * m0, xx1 = own[1][p] * share + kRidge - m1 * m1;
      const float xy = both[p] * share - m0 * m1, inverse = 1 / (xx0 * xx1 - xy * xy);
      for (int c = 0; c < 2; ++c) {
        const float target = mean[2 + c][p] * share;
        const float a0 = along[0][c][p] * share - m0 * target, a1 = along[1][c][p] * share - m1 * target;
        slope[0][c][p] = (a0 * xx1 - a1 * xy) * inverse, slope[1][c][p] = (a1 * xx0 - a0 * xy) * inverse;
        predicted[c][p] = target - slope[0][c][p] * m0 - slope[1][c][p] * m1;
      }
    }
    const float precision = 1 / (scale * scale);
    for (long k = 0; k < kNeighbours; ++k)
#pragma omp simd
      for (long p = 0; p < kPoints; ++p) {
        float rest = 0;
        for (int c = 0; c < 2; ++c) {
          const float r = near.y[c][k][p] - predicted[c][p] - slope[0][c][p] * near.x[0][k][p] - slope[1][c][p] * near.x[1][k][p];
          rest += r * r;
        }
        const float root = 1 / (rest * precision + 1);
        square[k][p] = rest, weight[k][p] = near.base[k][p] * root * root;
      }
  }
  float support[kPoints] = {}, spread[kPoints] = {};
  for (long k = 0; k < kNeighbours; ++k)
#pragma omp simd
    for (long p = 0; p < kPoints; ++p) support[p] += weight[k][p], spread[p] += weight[k][p] * square[k][p];
#pragma omp simd
  for (long p = 0; p < kPoints; ++p) {
    for (int c = 0; c < 2; ++c)
      out[c][p] = predicted[c][p] + centre[2 + c][p] - slope[0][c][p] * centre[0][p] - slope[1][c][p] * centre[1][p];
    out[2][p] = support[p], out[3][p] = std::sqrt(spread[p] / (support[p] + kTiny));
  }
}

}  // namespace
}  // namespace maps

// positions, targets (n, 2), confidence (n,) → out (n, 4): predicted position, support, spread.
extern "C" void matcher_local_maps(const float* positions, const float* targets, const float* confidence, long n, float* out,
                                   int threads) {
  using namespace maps;
  const Matches matches(positions, targets, confidence, n);
  const long size = (long)matches.place[0].size();
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> distances(size);
    std::vector<uint8_t> near(size);
    std::vector<long> found(size);
#pragma omp for schedule(static)
    for (long first = 0; first < n; first += kPoints) {
      Neighbours local;
      memset(&local, 0, sizeof local);
      const long here = std::min(kPoints, n - first);
      for (long p = 0; p < here; ++p) {
        const float* at = positions + 2 * (first + p);
        const long count = nearest(matches, at[0], at[1], matches.owner[first + p], distances.data(), near.data(), found.data());
        float reach = 0;
        for (long k = 0; k < count; ++k) reach = std::max(reach, distances[found[k]]);
        reach = std::max(std::sqrt(reach), 0.02f) / 1.5f;
        for (long k = 0; k < count; ++k) {
          const long j = found[k];
          for (int c = 0; c < 2; ++c) {
            local.x[c][k][p] = (matches.place[c][j] - at[c]) / reach;
            local.y[c][k][p] = matches.target[c][j];
          }
          local.base[k][p] = attention::exponential(distances[j] / (-2 * reach * reach)) * matches.confidence[j];
        }
      }
      float made[4][kPoints];
      fit(local, made);
      for (long p = 0; p < here; ++p)
        for (int c = 0; c < 4; ++c) out[4 * (first + p) + c] = made[c][p];
    }
  }
}

// --- Least-squares matching of windows of two images, one match after the other; `matcher/refine.py` does the same by NumPy
// and explains it. Plain loops over the samples of a window, which the compiler turns into vector instructions.

namespace windows {
namespace {


constexpr int kMostSide = 31;  // samples along a side of a window
constexpr int kLanes = 16;     // loops are over multiples of it
constexpr int kMost = (kMostSide + 2) * (kMostSide + 2) + 2 * kLanes;
constexpr float kEpsilon = 1e-12f;

// One image of the matches.
struct View {
  const float* const* levels;  // of its pyramid
  const int32_t* sizes;        // (levels, 2) width and height
  const uint8_t* mask;         // of level 0, or null
  const double* affine;        // (matches, 2, 3) from (1, x, y) in the frame to pixels of level 0
  const int32_t* level;        // (matches,) that each is sampled from
};

struct Settings {
  int32_t side, first_steps, steps, reweighings;
  float deformation, robust_scale, inflation, min_residual, noise_energy, max_damping, initial_noise, tolerance;
};

struct Results {
  double* change;      // (matches, 6), at first the prior
  double* covariance;  // (matches, 2, 2)
  double* numbers;     // (4, matches) correlation, contrast, last step, visible share
};

// The samples of a window with a margin of one, row by row. Sums run over `count` samples from `first`, where those of the
// margin have no weight.
struct Grid {
  int side, stride, first, count, all;
  alignas(64) float x[kMost], y[kMost], weights[kMost];
  float square;  // sum of squared weights
};

// A linear gradient of illumination is taken out by weighted least squares.
struct Illumination {
  alignas(64) float weights[kMost];
  float inverse[3][3];
};

// Normal equations of one window.
struct Equations {
  alignas(64) float z[kMost], dx[kMost], dy[kMost], blur[kMost];
  double inverse[6][6], prior[6], weakest[2], damping;
};

struct Window {
  const Grid& grid;
  const Settings& settings;
  Illumination light;
  Equations equations;
  alignas(64) float outer0[kMost], outer1[kMost], a[kMost], b[kMost], c[kMost];
};

inline int up(int n) { return (n + kLanes - 1) / kLanes * kLanes; }

void make_grid(Grid& grid, int side, const float* weights) {
  memset(&grid, 0, sizeof(grid));
  grid.side = side, grid.stride = side + 2, grid.first = grid.stride + 1;
  grid.count = up(side * grid.stride - 2), grid.all = up(grid.stride * grid.stride);
  for (int row = 0, i = 0; row < grid.stride; ++row)
    for (int column = 0; column < grid.stride; ++column, ++i) {
      grid.x[i] = column - 0.5f * (grid.stride - 1), grid.y[i] = row - 0.5f * (grid.stride - 1);
      const bool inside = row > 0 && column > 0 && row <= side && column <= side;
      grid.weights[i] = inside ? weights[(row - 1) * side + column - 1] : 0.0f;
      grid.square += grid.weights[i] * grid.weights[i];
    }
}

// Bilinear interpolation at the samples from `first`; the edge is replicated beyond the image.
void sample(const float* image, int width, int height, const double affine[2][3], const Grid& grid, int first, int count,
            float* out) {
  const float ax = affine[0][0], bx = affine[0][1], cx = affine[0][2];
  const float ay = affine[1][0], by = affine[1][1], cy = affine[1][2];
  const float right = width - 1, bottom = height - 1;
  const float *gx = grid.x + first, *gy = grid.y + first;
  out += first;
#pragma omp simd
  for (int i = 0; i < count; ++i) {
    float x = ax + bx * gx[i] + cx * gy[i], y = ay + by * gx[i] + cy * gy[i];
    x = x > 0 ? x : 0, y = y > 0 ? y : 0;
    x = x < right ? x : right, y = y < bottom ? y : bottom;
    const int32_t left = (int32_t)x, top = (int32_t)y;
    const int32_t across = left + 1 < width ? 1 : 0, down = top + 1 < height ? width : 0;
    const float fx = x - left, fy = y - top;
    const int32_t at = top * width + left;
    const float p = image[at], q = image[at + across], r = image[at + down], s = image[at + down + across];
    const float above = p + fx * (q - p), below = r + fx * (s - r);
    out[i] = above + fy * (below - above);
  }
}

void sample_view(const View& view, long k, const double affine[2][3], const Grid& grid, int first, int count, float* out) {
  const int level = view.level[k];
  const double share = std::ldexp(1.0, -level);
  double scaled[2][3];
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 3; ++j) scaled[i][j] = affine[i][j] * share;
  sample(view.levels[level], view.sizes[2 * level], view.sizes[2 * level + 1], scaled, grid, first, count, out);
}

// Where a window lies in image 1 after its change.
void moved(const double* affine, const double* change, double out[2][3]) {
  for (int i = 0; i < 2; ++i) {
    const double p = affine[3 * i + 1], q = affine[3 * i + 2];
    out[i][0] = affine[3 * i] + p * change[0] + q * change[1];
    out[i][1] = p * (1 + change[2]) + q * change[3];
    out[i][2] = p * change[4] + q * (1 + change[5]);
  }
}

// The weights decide which gradient of illumination fits best.
void weigh(Illumination& light, const Grid& grid, const float* weights) {
  const float half = 2.0f / grid.side;
  const float *w = weights + grid.first, *gx = grid.x + grid.first, *gy = grid.y + grid.first;
  float* to = light.weights + grid.first;
  float one = 0, x = 0, y = 0, xx = 0, xy = 0, yy = 0;
#pragma omp simd reduction(+ : one, x, y, xx, xy, yy)
  for (int i = 0; i < grid.count; ++i) {
    const float v = w[i], vx = v * gx[i] * half, vy = v * gy[i] * half;
    to[i] = v, one += v, x += vx, y += vy;
    xx += vx * gx[i] * half, xy += vx * gy[i] * half, yy += vy * gy[i] * half;
  }
  const double a = one, b = x, c = y, d = xx, e = xy, f = yy;
  const double determinant = a * (d * f - e * e) - b * (b * f - c * e) + c * (b * e - c * d);
  const double s = 1 / (std::fabs(determinant) > 1e-30 ? determinant : 1e-30);
  light.inverse[0][0] = s * (d * f - e * e), light.inverse[1][1] = s * (a * f - c * c);
  light.inverse[2][2] = s * (a * d - b * b);
  light.inverse[0][1] = light.inverse[1][0] = s * (c * e - b * f);
  light.inverse[0][2] = light.inverse[2][0] = s * (b * e - c * d);
  light.inverse[1][2] = light.inverse[2][1] = s * (b * c - a * e);
}

// Values without the gradient and of unit norm; returns the norm that they had.
float normalise(const Illumination& light, const Grid& grid, const float* values, float* z) {
  const float half = 2.0f / grid.side;
  const float *w = light.weights + grid.first, *gx = grid.x + grid.first, *gy = grid.y + grid.first;
  values += grid.first, z += grid.first;
  float m = 0, mx = 0, my = 0;
#pragma omp simd reduction(+ : m, mx, my)
  for (int i = 0; i < grid.count; ++i) {
    const float v = w[i] * values[i];
    m += v, mx += v * gx[i], my += v * gy[i];
  }
  mx *= half, my *= half;
  const float(*n)[3] = light.inverse;
  const float g = n[0][0] * m + n[0][1] * mx + n[0][2] * my;
  const float gradient_x = half * (n[1][0] * m + n[1][1] * mx + n[1][2] * my);
  const float gradient_y = half * (n[2][0] * m + n[2][1] * mx + n[2][2] * my);
  float square = 0;
#pragma omp simd reduction(+ : square)
  for (int i = 0; i < grid.count; ++i) {
    const float v = values[i] - g - gradient_x * gx[i] - gradient_y * gy[i];
    z[i] = v, square += w[i] * v * v;
  }
  const float norm = std::sqrt(square + kEpsilon), share = 1 / norm;
#pragma omp simd
  for (int i = 0; i < grid.count; ++i) z[i] *= share;
  return norm;
}

float mean_product(const float* weights, const Grid& grid, const float* a, const float* b) {
  weights += grid.first, a += grid.first, b += grid.first;
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < grid.count; ++i) sum += weights[i] * a[i] * b[i];
  return sum;
}

// out = a - b without its projection on a difference of blur.
void residual_of(const Window& window, const float* a, const float* b, float scale, float* out) {
  const Grid& grid = window.grid;
  const float *blur = window.equations.blur + grid.first, *w = window.light.weights + grid.first;
  a += grid.first, b += grid.first, out += grid.first;
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < grid.count; ++i) {
    const float r = scale * (a[i] - b[i]);
    out[i] = r, sum += w[i] * r * blur[i];
  }
#pragma omp simd
  for (int i = 0; i < grid.count; ++i) out[i] -= sum * blur[i];
}

float noise_of(const Window& window, const float* residual, float* square) {
  const Settings& s = window.settings;
  *square = mean_product(window.grid.weights, window.grid, residual, residual);
  return s.inflation * (*square > s.min_residual ? *square : s.min_residual) * window.grid.square;
}

// Inverse of a symmetric positive definite matrix, in place, by elimination.
void invert(double (&m)[6][6]) {
  for (int k = 0; k < 6; ++k) {
    const double pivot = 1 / m[k][k];
    m[k][k] = 1;
    for (int j = 0; j < 6; ++j) m[k][j] *= pivot;
    for (int i = 0; i < 6; ++i) {
      if (i == k) continue;
      const double share = m[i][k];
      m[i][k] = 0;
      for (int j = 0; j < 6; ++j) m[i][j] -= share * m[k][j];
    }
  }
}

// Weighted sums of values times 1, x, y and, for the first six, xx, xy, yy.
inline void six(const Grid& grid, const float* w, const float* a, const float* b, float* out) {
  const float *gx = grid.x + grid.first, *gy = grid.y + grid.first;
  w += grid.first, a += grid.first, b += grid.first;
  float s = 0, x = 0, y = 0, xx = 0, xy = 0, yy = 0;
#pragma omp simd reduction(+ : s, x, y, xx, xy, yy)
  for (int i = 0; i < grid.count; ++i) {
    const float v = w[i] * a[i] * b[i], vx = v * gx[i], vy = v * gy[i];
    s += v, x += vx, y += vy, xx += vx * gx[i], xy += vx * gy[i], yy += vy * gy[i];
  }
  out[0] = s, out[1] = x, out[2] = y, out[3] = xx, out[4] = xy, out[5] = yy;
}

// Of derivatives times 1, x and y, x before y in each; illumination and blur are eliminated.
void normal_matrix(const Window& window, double (&matrix)[6][6]) {
  static const int kProduct[3][3] = {{0, 1, 2}, {1, 3, 4}, {2, 4, 5}};
  const Grid& grid = window.grid;
  const Equations& e = window.equations;
  const Illumination& light = window.light;
  const float half = 2.0f / grid.side, basis[3] = {1, half, half};
  const float* derivative[2] = {e.dx, e.dy};
  float products[3][6], shading[2][6], blurred[2][6];
  six(grid, light.weights, e.dx, e.dx, products[0]);
  six(grid, light.weights, e.dx, e.dy, products[1]);
  six(grid, light.weights, e.dy, e.dy, products[2]);
  alignas(64) float ones[kMost];
  for (int i = 0; i < grid.count; ++i) ones[grid.first + i] = 1;
  for (int axis = 0; axis < 2; ++axis) {
    six(grid, light.weights, derivative[axis], ones, shading[axis]);
    six(grid, light.weights, derivative[axis], e.blur, blurred[axis]);
  }
  double across[6][3], turned[6][3];
  for (int i = 0; i < 6; ++i)
    for (int j = 0; j < 3; ++j) across[i][j] = basis[j] * shading[i % 2][kProduct[i / 2][j]];
  for (int i = 0; i < 6; ++i)
    for (int j = 0; j < 3; ++j) {
      turned[i][j] = 0;
      for (int k = 0; k < 3; ++k) turned[i][j] += across[i][k] * light.inverse[k][j];
    }
  for (int i = 0; i < 6; ++i)
    for (int j = 0; j < 6; ++j) {
      double value = products[i % 2 + j % 2][kProduct[i / 2][j / 2]];
      for (int k = 0; k < 3; ++k) value -= turned[i][k] * across[j][k];
      matrix[i][j] = value - (double)blurred[i % 2][i / 2] * blurred[j % 2][j / 2];
    }
}

// Normal equations about a window `outer` with its margin; `r` and `s` are normalised windows whose difference, scaled, is
// the residual.
void linearise(Window& window, const float* outer, const float* r, const float* s, float scale, double deviation) {
  const Grid& grid = window.grid;
  const Settings& settings = window.settings;
  Equations& e = window.equations;
  const int first = grid.first, stride = grid.stride;
#pragma omp simd
  for (int i = first; i < first + grid.count; ++i) {
    const float left = outer[i - 1], right = outer[i + 1], above = outer[i - stride], below = outer[i + stride];
    e.dx[i] = 0.5f * (right - left), e.dy[i] = 0.5f * (below - above);
    window.a[i] = left + right + above + below - 4 * outer[i];
  }
  normalise(window.light, grid, window.a, e.blur);
  residual_of(window, r, s, scale, window.a);
  float square;
  const double noise = noise_of(window, window.a, &square);
  double(&m)[6][6] = e.inverse;
  normal_matrix(window, m);
  const double xx = m[0][0], xy = m[0][1], yy = m[1][1], energy = settings.noise_energy * square;
  const double angle = 0.5 * std::atan2(2 * xy, xx - yy) + 1.5707963267948966;
  const double least = 0.5 * (xx + yy) - std::hypot(0.5 * (xx - yy), xy);
  const double above = least - energy > kEpsilon ? least - energy : kEpsilon;
  const double damping = least * (energy / above) * (energy / above);
  e.weakest[0] = std::cos(angle), e.weakest[1] = std::sin(angle);
  e.damping = damping < 0 ? 0 : damping > settings.max_damping ? settings.max_damping : damping;
  for (int i = 0; i < 6; ++i) {
    e.prior[i] = noise / (i < 2 ? deviation * deviation : (double)settings.deformation * settings.deformation);
    m[i][i] += e.prior[i];
  }
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 2; ++j) m[i][j] += e.damping * e.weakest[i] * e.weakest[j];
  invert(m);
}

// Gauss-Newton steps until they are short; returns the length of the last shift.
double iterate(Window& window, const View& view1, long k, int steps, const double* prior, double* change, double length) {
  const Grid& grid = window.grid;
  const Equations& e = window.equations;
  for (int done = 0; done < steps; ++done) {
    double affine[2][3], sides[6], step[6];
    moved(view1.affine + 6 * k, change, affine);
    sample_view(view1, k, affine, grid, grid.first, grid.count, window.a);
    normalise(window.light, grid, window.a, window.b);
    residual_of(window, e.z, window.b, 1, window.a);
    const float *w = window.light.weights + grid.first, *r = window.a + grid.first;
    const float *dx = e.dx + grid.first, *dy = e.dy + grid.first, *gx = grid.x + grid.first, *gy = grid.y + grid.first;
    float x = 0, y = 0, xx = 0, yx = 0, xy = 0, yy = 0;
#pragma omp simd reduction(+ : x, y, xx, yx, xy, yy)
    for (int i = 0; i < grid.count; ++i) {
      const float vx = w[i] * r[i] * dx[i], vy = w[i] * r[i] * dy[i];
      x += vx, y += vy, xx += vx * gx[i], yx += vy * gx[i], xy += vx * gy[i], yy += vy * gy[i];
    }
    const float sums[6] = {x, y, xx, yx, xy, yy};
    const double ox = change[0] - prior[0], oy = change[1] - prior[1];
    const double along = e.damping * (e.weakest[0] * ox + e.weakest[1] * oy);
    for (int i = 0; i < 6; ++i)
      sides[i] = sums[i] - e.prior[i] * (change[i] - prior[i]) - (i < 2 ? along * e.weakest[i] : 0);
    for (int i = 0; i < 6; ++i) {
      step[i] = 0;
      for (int j = 0; j < 6; ++j) step[i] += e.inverse[i][j] * sides[j];
    }
    length = std::hypot(step[0], step[1]);
    const double share = length > 1 ? 1 / length : 1;  // the shift is limited to one pixel of the frame
    for (int i = 0; i < 6; ++i) change[i] += share * step[i];
    length *= share;
    if (!(length > window.settings.tolerance)) break;
  }
  return length;
}

bool contains(const View& view, const double affine[2][3], double half) {
  if (view.mask) return false;
  for (int i = 0; i < 2; ++i) {
    const double reach = half * (std::fabs(affine[i][1]) + std::fabs(affine[i][2]));
    if (!(affine[i][0] >= reach && affine[i][0] + reach <= view.sizes[i] - 1)) return false;
  }
  return true;
}

// Samples beyond the image, or masked, lose their weight.
void hide(const View& view, const double affine[2][3], const Grid& grid, float* weights) {
  const int width = view.sizes[0], height = view.sizes[1];
  for (int i = grid.first; i < grid.first + grid.count; ++i) {
    const float x = affine[0][0] + affine[0][1] * grid.x[i] + affine[0][2] * grid.y[i];
    const float y = affine[1][0] + affine[1][1] * grid.x[i] + affine[1][2] * grid.y[i];
    bool usable = x >= 0 && y >= 0 && x <= width - 1 && y <= height - 1;
    if (usable && view.mask) usable = view.mask[std::lrint(y) * (long)width + std::lrint(x)] != 0;
    if (!usable) weights[i] = 0;
  }
}

// Robust weights from the residuals, and equations about both windows; returns the share of the window that is visible.
double reweigh(Window& window, const View& view0, const View& view1, long k, const double* change, double deviation,
               float* norm0) {
  const Grid& grid = window.grid;
  double affine0[2][3], affine1[2][3];
  memcpy(affine0, view0.affine + 6 * k, sizeof(affine0));
  moved(view1.affine + 6 * k, change, affine1);
  sample_view(view1, k, affine1, grid, 0, grid.all, window.outer1);
  normalise(window.light, grid, window.outer0, window.a);
  normalise(window.light, grid, window.outer1, window.b);
  memcpy(window.c, grid.weights, sizeof(float) * (grid.first + grid.count));
  if (!contains(view0, affine0, 0.5 * grid.side) || !contains(view1, affine1, 0.5 * grid.side)) {
    hide(view0, affine0, grid, window.c);
    hide(view1, affine1, grid, window.c);
  }
  float *w = window.c + grid.first, visible = 0, mean = 0;
  const float *p = window.a + grid.first, *q = window.b + grid.first;
#pragma omp simd reduction(+ : visible, mean)
  for (int i = 0; i < grid.count; ++i) visible += w[i], mean += w[i] * std::fabs(p[i] - q[i]);
  mean /= visible > kEpsilon ? visible : kEpsilon;
  if (visible < 0.1f) {  // it is rejected, but its equations must stay regular
    memcpy(window.c, grid.weights, sizeof(float) * (grid.first + grid.count));
  } else {
    float scale = window.settings.robust_scale * 1.25f * mean, sum = 0;
    scale = 1 / (scale > 0.05f ? scale : 0.05f);
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < grid.count; ++i) {
      const float r = (p[i] - q[i]) * scale, root = 1 / (1 + r * r);
      w[i] *= root * root, sum += w[i];
    }
    const float share = 1 / sum;
#pragma omp simd
    for (int i = 0; i < grid.count; ++i) w[i] *= share;
  }
  weigh(window.light, grid, window.c);
  *norm0 = normalise(window.light, grid, window.outer0, window.equations.z);
  const float share0 = 0.5f / *norm0, share1 = 0.5f / normalise(window.light, grid, window.outer1, window.b);
#pragma omp simd
  for (int i = 0; i < grid.all; ++i) window.c[i] = share0 * window.outer0[i] + share1 * window.outer1[i];
  linearise(window, window.c, window.equations.z, window.b, 1, deviation);
  return visible;
}

void finish(Window& window, const View& view1, long k, long count, double deviation, float norm0, double last_step,
            double visible, const Results& results) {
  const Grid& grid = window.grid;
  const Equations& e = window.equations;
  double affine[2][3];
  moved(view1.affine + 6 * k, results.change + 6 * k, affine);
  sample_view(view1, k, affine, grid, grid.first, grid.count, window.a);
  const float norm1 = normalise(window.light, grid, window.a, window.b);
  results.numbers[k] = mean_product(window.light.weights, grid, e.z, window.b);
  results.numbers[count + k] = norm0 < norm1 ? norm0 : norm1;
  results.numbers[2 * count + k] = last_step;
  results.numbers[3 * count + k] = visible;
  residual_of(window, e.z, window.b, 1, window.a);
  float square;
  const double noise = noise_of(window, window.a, &square);
  double share = 0;  // of the prior in the estimate along the weakest direction
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 2; ++j) share += e.damping * e.weakest[i] * e.inverse[i][j] * e.weakest[j];
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 2; ++j)
      results.covariance[4 * k + 2 * i + j] = noise * e.inverse[i][j] +
                                              share * share * deviation * deviation * e.weakest[i] * e.weakest[j] +
                                              (i == j) * last_step * last_step;
}

void fit(Window& window, const View& view0, const View& view1, long k, long count, double deviation,
         const Results& results) {
  const Grid& grid = window.grid;
  const Settings& s = window.settings;
  double *change = results.change + 6 * k, prior[6], affine[2][3];
  memcpy(prior, change, sizeof(prior));
  memcpy(affine, view0.affine + 6 * k, sizeof(affine));
  sample_view(view0, k, affine, grid, 0, grid.all, window.outer0);
  weigh(window.light, grid, grid.weights);
  float norm0 = normalise(window.light, grid, window.outer0, window.equations.z);
  moved(view1.affine + 6 * k, change, affine);
  sample_view(view1, k, affine, grid, grid.first, grid.count, window.a);
  normalise(window.light, grid, window.a, window.b);
  for (int i = 0; i < grid.all; ++i) window.c[i] = window.outer0[i] / norm0;
  linearise(window, window.c, window.equations.z, window.b, s.initial_noise, deviation);
  double length = iterate(window, view1, k, s.first_steps, prior, change, INFINITY), visible = 0;
  for (int round = 0; round < s.reweighings; ++round) {
    visible = reweigh(window, view0, view1, k, change, deviation, &norm0);
    length = iterate(window, view1, k, s.steps, prior, change, length);
  }
  finish(window, view1, k, count, deviation, norm0, length, visible, results);
}

}  // namespace
}  // namespace windows


// Fits `count` matches. weights: (side²,) of the samples; deviation: (count,) prior of the shift along an axis. Returns 0,
// or 1 if the window is too large.
extern "C" int matcher_fit_windows(const windows::View* view0, const windows::View* view1,
                                   const windows::Settings* settings, const float* weights,
                                   const double* deviation, long count, const windows::Results* results, int threads) {
  using namespace windows;
  if (settings->side > kMostSide) return 1;
  Grid grid;
  make_grid(grid, settings->side, weights);
#pragma omp parallel num_threads(threads)
  {
    Window window{grid, *settings, {}, {}, {}, {}, {}, {}, {}};
#pragma omp for schedule(dynamic, 16)
    for (long k = 0; k < count; ++k) fit(window, *view0, *view1, k, count, deviation[k], *results);
  }
  return 0;
}
