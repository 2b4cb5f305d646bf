// Softmax attention by vector units, some keys at a time with a running maximum and sum (Milakov and Gimelshein 2018),
// so that scores never leave the cache: in float32, or by dot products of pairs in bfloat16 where a processor has them.
#include <algorithm>
#include <vector>

#include "numbers.h"
#include "vectors.h"

namespace {

constexpr long kQueries = 24;  // a multiple of every `kTileRows`
constexpr long kKeys = 64;     // a multiple of every panel
constexpr long kPanel = 2 * kLanes;
constexpr long kWidest = 128;
constexpr float kSmall = 60.0f;  // exponentials of such scores, their sums and those of values are ordinary numbers

template <typename Number>
struct Rows {  // heads of `width` channels: head h of row i begins at first + i * row + h * head
  const Number* first;
  long count, row, head;
  const Number* at(long h, long i) const { return first + i * row + h * head; }
};

// Arithmetic on floats.
struct Whole {
  typedef float Element;
  static constexpr long kEach = 1;  // numbers of an element
  static Element pack(float first, float) { return first; }
  static void pack_row(const float* row, Element* out) { memcpy(out, row, sizeof(float) * kPanel); }
  static float exponential_of(float x) { return exponential(x); }

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
  static constexpr long kEach = 2;
  static Element pack(float first, float second) { return rounded(first) | rounded(second) << 16; }

  static void pack_row(const float* row, Element* out) {
    const __m512bh pairs = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(row + kLanes), _mm512_loadu_ps(row));
    _mm512_storeu_si512(out, (__m512i)pairs);
  }

  // To a relative error of 7.5e-5, a fiftieth of a step of bfloat16.
  static float exponential_of(float x) {
    x *= 1.44269504f;
    const float n = __builtin_floorf(x), f = x - n;
    float p = 0.07802452f * f + 0.22606716f;
    p = p * f + 0.69583354f;
    p = p * f + 0.99992522f;
    return p * as_float((uint32_t)((int32_t)n + 127) << 23);
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
void pack_keys(const Rows<Number>& k, long h, long padded, long width, typename Arithmetic::Element* out) {
  for (long j = 0; j < padded; j += kPanel, out += width / Arithmetic::kEach * kPanel)
    for (long n = 0; n < kPanel && j + n < k.count; ++n) {
      const Number* key = k.at(h, j + n);
      for (long c = 0; c < width; c += Arithmetic::kEach)
        out[c / Arithmetic::kEach * kPanel + n] = Arithmetic::pack(wide(key[c]), wide(key[c + Arithmetic::kEach - 1]));
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
  float most[kQueries];
  float sums[kQueries][kLanes];  // of the weights, lane by lane: to add up lanes is slow
};

void add_lanes(const float* row, float* sums) {
  for (long j = 0; j < kKeys; j += kLanes) store(load(sums) + load(row + j), sums);
}

// Scores (kQueries, kKeys), of which the last beyond `keys` do not count, become weights relative to the running
// maximum; what was summed before is brought to it.
template <typename Arithmetic>
void weigh(float* scores, long keys, float scale, long width, Running& running, float* message) {
  for (long r = 0; r < kQueries; ++r) {
    float *row = scores + r * kKeys, most = running.most[r];
    for (long j = keys; j < kKeys; ++j) row[j] = -INFINITY;
#pragma omp simd reduction(max : most)
    for (long j = 0; j < kKeys; ++j) {
      row[j] *= scale;
      most = row[j] > most ? row[j] : most;
    }
#pragma omp simd
    for (long j = 0; j < kKeys; ++j) {
      const float x = row[j] - most;
      row[j] = x < -80.0f ? 0.0f : Arithmetic::exponential_of(x < -80.0f ? -80.0f : x);
    }
    const float before = running.most[r] - most, share = before < -80.0f ? 0.0f : exponential(before);
    running.most[r] = most;
    if (share != 1.0f) {
      store(load(running.sums[r]) * share, running.sums[r]);
#pragma omp simd
      for (long c = 0; c < width; ++c) message[r * width + c] *= share;
    }
    add_lanes(row, running.sums[r]);
  }
}

// The same of scores that are known to be small: their exponentials are ordinary numbers without a maximum.
template <typename Arithmetic>
void weigh_small(float* scores, long keys, float scale, Running& running) {
  for (long r = 0; r < kQueries; ++r) {
    float* row = scores + r * kKeys;
#pragma omp simd
    for (long j = 0; j < kKeys; ++j) row[j] = Arithmetic::exponential_of(row[j] * scale);
    for (long j = keys; j < kKeys; ++j) row[j] = 0.0f;
    add_lanes(row, running.sums[r]);
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
            int threads) {
  typedef typename Arithmetic::Element Element;
  const long each = Arithmetic::kEach, padded = (k.count + kKeys - 1) / kKeys * kKeys;
  const long blocks = (q.count + kQueries - 1) / kQueries, packed = padded * width / each;
  const float scale = 1.0f / std::sqrt((float)width);
  std::vector<Element> keys(heads * packed), values(heads * packed);
  std::vector<char> small(heads);
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (long h = 0; h < heads; ++h) {
      pack_keys<Arithmetic>(k, h, padded, width, keys.data() + h * packed);
      pack_values<Arithmetic>(v, h, padded, width, values.data() + h * packed);
      small[h] = std::sqrt(longest(q, h, width)) * std::sqrt(longest(k, h, width)) * scale < kSmall;
    }
    alignas(64) Element query[kQueries * kWidest], weights[kQueries * kKeys];
    alignas(64) float scores[kQueries * kKeys], message[kQueries * kWidest];
#pragma omp for schedule(static)
    for (long task = 0; task < heads * blocks; ++task) {
      const long h = task / blocks, first = task % blocks * kQueries, rows = std::min(kQueries, q.count - first);
      for (long r = 0; r < kQueries; ++r) {
        const Number* from = q.at(h, first + std::min(r, rows - 1));
        for (long c = 0; c < width; c += each)
          query[(r * width + c) / each] = Arithmetic::pack(wide(from[c]), wide(from[c + each - 1]));
      }
      Running running;
      std::fill_n(running.most, kQueries, -INFINITY);
      memset(running.sums, 0, sizeof running.sums);
      std::fill_n(message, kQueries * width, 0.0f);
      for (long j = 0; j < padded; j += kKeys) {
        for (long p = 0; p < kKeys; p += kPanel)
          multiply<Arithmetic>(query, width / each, keys.data() + h * packed + (j + p) * width / each, width / each,
                               scores + p, kKeys, false);
        const long here = std::min(kKeys, k.count - j);
        if (small[h])
          weigh_small<Arithmetic>(scores, here, scale, running);
        else
          weigh<Arithmetic>(scores, here, scale, width, running, message);
        for (long x = 0; x < kQueries * kKeys; x += kPanel) Arithmetic::pack_row(scores + x, weights + x / each);
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
                 long heads, long width, int threads) {
  const Rows<Number> queries{(const Number*)q, n, strides[0], strides[1]}, keys{(const Number*)k, m, strides[2], strides[3]};
  const Rows<Number> values{(const Number*)v, m, strides[4], strides[5]};
  attend<Arithmetic>(queries, keys, values, (Number*)out, heads, width, threads);
}

}  // namespace

// out[h, i] = Σ_j exp(q_i · k_j / √width) v_j / Σ_j exp(…), for heads of `width` channels, a multiple of 32, of at most
// 128; `half`: all are bfloat16, else float32. Strides of rows and heads of q, k and v; out (n, heads, width).
extern "C" void matcher_attend_vectors(const void* q, const void* k, const void* v, void* out, const long* strides,
                                       int half, long n, long m, long heads, long width, int threads) {
  if (!half)
    return attend_rows<Whole, float>(q, k, v, out, strides, n, m, heads, width, threads);
#ifdef __AVX512BF16__
  attend_rows<Pairs, Half>(q, k, v, out, strides, n, m, heads, width, threads);
#else
  attend_rows<Whole, Half>(q, k, v, out, strides, n, m, heads, width, threads);
#endif
}
