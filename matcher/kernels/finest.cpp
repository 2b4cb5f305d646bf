// The front end's finest maps, half of the resolution and 16 channels, in bfloat16: what makes the first of them of the
// pixels, and what makes scores of the last. Maps in between are there some rows at a time, in the cache.
#include "map_rows.h"

namespace {

constexpr long kChannels = 16;

#ifdef __AVX512BF16__
constexpr long kPixels = 12;  // that are computed together
constexpr long kEdge = 1;     // pixels beside a row, which are zero

typedef uint32_t Pair;  // of neighbouring numbers in bfloat16

// Weights (16, taps, 2 · pairs), the last of an odd number missing, as (taps, pairs, 16) pairs.
std::vector<Pair> pack(const Half* weights, long taps, long numbers) {
  const long pairs = (numbers + 1) / 2;
  std::vector<Pair> packed(taps * pairs * kChannels);
  for (long o = 0; o < kChannels; ++o)
    for (long t = 0; t < taps; ++t)
      for (long n = 0; n < numbers; ++n)
        packed[(t * pairs + n / 2) * kChannels + o] |= (Pair)weights[(o * taps + t) * numbers + n].bits << n % 2 * 16;
  return packed;
}

// `kCount` neighbouring pixels of 16 channels: products of lines and weights, plus the bias, not less than 0. Line k
// begins at lines[k]; a pixel is `kStride` pairs after the one before, and `kPairs` of them are weighed.
template <long kCount, long kStride, long kPairs>
void convolve(const Pair* const* lines, long count, const Pair* weights, const float* bias, Half* out) {
  __m512 sums[kCount];
  for (long p = 0; p < kCount; ++p) sums[p] = _mm512_setzero_ps();
  for (long k = 0; k < count; ++k)
#pragma GCC unroll 4
    for (long c = 0; c < kPairs; ++c, weights += kChannels) {
      const __m512bh weight = (__m512bh)_mm512_loadu_si512(weights);
#pragma GCC unroll 12
      for (long p = 0; p < kCount; ++p)
        sums[p] = _mm512_dpbf16_ps(sums[p], (__m512bh)_mm512_set1_epi32((int)lines[k][p * kStride + c]), weight);
    }
  for (long p = 0; p < kCount; ++p) {
    const __m512 sum = _mm512_add_ps(sums[p], _mm512_loadu_ps(bias));
    const __m256bh pixel = _mm512_cvtneps_pbh(_mm512_max_ps(sum, _mm512_setzero_ps()));
    _mm256_storeu_si256((__m256i*)(out + p * kChannels), (__m256i)pixel);
  }
}

template <long kStride, long kPairs>
void convolve_row(const Pair* const* lines, long count, long width, const Pair* weights, const float* bias, Half* out) {
  const Pair* here[9];
  for (long x = 0; x < width;) {
    for (long k = 0; k < count; ++k) here[k] = lines[k] + x * kStride;
    if (width - x >= kPixels) {
      convolve<kPixels, kStride, kPairs>(here, count, weights, bias, out + x * kChannels);
      x += kPixels;
    } else {
      convolve<1, kStride, kPairs>(here, count, weights, bias, out + x * kChannels);
      x += 1;
    }
  }
}

// Some rows, each with zeros on both sides, of which row y is computed when it is first asked for; rows beyond the image
// are zeros. They are asked for in order.
class Ring {
 public:
  Ring(long rows, long height, long numbers, long before, long after)
      : height_(height), before_(before), size_(before + numbers + after), held_(rows, -9), rows_(rows * size_) {}

  template <typename Make>
  const Half* row(long y, const Make& make) {
    const long slot = (y + (long)held_.size()) % (long)held_.size();
    Half* to = rows_.data() + slot * size_;
    if (held_[slot] != y) {
      held_[slot] = y;
      if (y < 0 || y >= height_) std::fill_n(to, size_, Half{0});
      else make(to + before_);
    }
    return to;
  }

 private:
  long height_, before_, size_;
  std::vector<long> held_;
  std::vector<Half> rows_;  // zeros where nothing is written
};

// Where the taps of a 3 × 3 convolution begin in rows that a ring holds.
struct Taps {
  const Pair* lines[9];

  void set(long k, const Half* row) {
    for (long x = 0; x < 3; ++x) lines[3 * k + x] = (const Pair*)(row + x * kChannels);
  }
};
#endif

}  // namespace

// Two convolutions, each followed by a ReLU: pixels (2 · height, 2 · width) less their mean, divided by `deviation` and
// rounded, by 5 × 5 with a step of 2, weights (16, 5, 5) and bias; then by 3 × 3, weights (16, 3, 3, 16) and bias, to out
// (height, width, 16). Returns whether this target has it.
extern "C" int matcher_begin_maps(const float* pixels, float deviation, long height, long width, const Half* weights,
                                  const float* bias, const Half* weights2, const float* bias2, Half* out, int threads) {
#ifdef __AVX512BF16__
  const std::vector<Pair> first = pack(weights, 5, 5), second = pack(weights2, 9, kChannels);
#pragma omp parallel num_threads(threads)
  {
    Ring image(5, 2 * height, 2 * width, 2, 4), maps(3, height, width * kChannels, kChannels, kChannels);
#pragma omp for schedule(static)
    for (long y = 0; y < height; ++y) {
      Taps taps;
      for (long k = 0; k < 3; ++k) {
        const long middle = y + k - 1;
        taps.set(k, maps.row(middle, [&](Half* to) {
          const Pair* lines[5];
          for (long j = 0; j < 5; ++j) {
            const long from = 2 * middle + j - 2;
            lines[j] = (const Pair*)image.row(from, [&](Half* line) {
              const float* row = pixels + from * 2 * width;
#pragma omp simd
              for (long x = 0; x < 2 * width; ++x) store(row[x] / deviation, line + x);
            });
          }
          convolve_row<1, 3>(lines, 5, width, first.data(), bias, to);
        }));
      }
      convolve_row<kChannels / 2, kChannels / 2>(taps.lines, 9, width, second.data(), bias2, out + y * width * kChannels);
    }
  }
  return 1;
#else
  return 0;
#endif
}

// Scores of pixels (4 · height, 4 · width): fine (2 · height, 2 · width, 16) + coarse (height, width, 16) enlarged, by 3 × 3
// with weights (16, 3, 3, 16), bias and a ReLU, and then as `matcher_score_pixels` with `last` and `last_bias`. Returns
// whether this target has it.
extern "C" int matcher_end_maps(const Half* fine, const Half* coarse, long height, long width, const Half* weights,
                                const float* bias, const float* last, const float* last_bias, float* out, int threads) {
#ifdef __AVX512BF16__
  const std::vector<Pair> packed = pack(weights, 9, kChannels);
  const long rows = 2 * height, columns = 2 * width, row = columns * kChannels;
#pragma omp parallel num_threads(threads)
  {
    Ring sums(3, rows, row, kChannels, kChannels);
    Planes planes(columns, kChannels);
    std::vector<float> mixed(width * kChannels);
    std::vector<Half> map(row);
    long held[3] = {-2, -2, -2};
#pragma omp for schedule(static)
    for (long y = 0; y < rows; ++y) {
      long slots[3];
      for (long j = 0; j < 3; ++j) {
        const long middle = y + j - 1, slot = slots[j] = (middle + 3) % 3;
        if (held[slot] == middle) continue;
        held[slot] = middle;
        if (middle < 0 || middle >= rows) {
          planes.clear(slot);
          continue;
        }
        Taps taps;
        for (long k = 0; k < 3; ++k) {
          const long from = middle + k - 1;
          taps.set(k, sums.row(from, [&](Half* to) {
            add_enlarged_row(fine + from * row, coarse, from, height, width, kChannels, mixed.data(), to);
          }));
        }
        convolve_row<kChannels / 2, kChannels / 2>(taps.lines, 9, columns, packed.data(), bias, map.data());
        planes.spread(map.data(), slot);
      }
      planes.score(slots, last, last_bias, out + 4 * y * columns);
    }
  }
  return 1;
#else
  return 0;
#endif
}
