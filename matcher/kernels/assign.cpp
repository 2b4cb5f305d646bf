// Assignment: the kernel of a transport problem, and the matches nearest to every point. Plain loops, which the
// compiler turns into vector instructions.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr long kBlock = 16;      // distances that are compared together
constexpr long kMost = 64;       // neighbours
constexpr float kHidden = 1e6f;  // squared distance of a match that does not count for a point

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

}  // namespace

// kernel = exp(scores + u + v), from e^least to e^87, of (rows, columns) with gaps of `stride` between the rows of scores.
extern "C" void matcher_absorb(const float* scores, long rows, long columns, long stride, const float* u,
                               const float* v, float least, float* kernel, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long i = 0; i < rows; ++i) {
    const float *from = scores + i * stride, shift = u[i];
    float* to = kernel + i * columns;
#pragma omp simd
    for (long j = 0; j < columns; ++j) {
      const float x = from[j] + shift + v[j];
      to[j] = exponential(x < least ? least : x > 87.0f ? 87.0f : x);
    }
  }
}

// For every point (points, 2) the `wanted` nearest of `count` matches at x, y, in no order: their squared distances and
// which they are. `hidden` matches count as far away, and so does a point's own, the one that it owns.
extern "C" void matcher_nearest(const float* positions, long points, const float* x, const float* y,
                                const uint8_t* hidden, const int64_t* owners, long count, long wanted,
                                float* distances, int64_t* nearest, int threads) {
  std::vector<long> own(points, -1);
  for (long j = 0; j < count; ++j) own[owners[j]] = j;
  const long padded = (count + kBlock - 1) / kBlock * kBlock;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> from(padded, INFINITY);
#pragma omp for schedule(static)
    for (long i = 0; i < points; ++i) {
      const float px = positions[2 * i], py = positions[2 * i + 1];
      float* d = from.data();
#pragma omp simd
      for (long j = 0; j < count; ++j) {
        const float dx = x[j] - px, dy = y[j] - py;
        const float square = dx * dx + dy * dy;
        d[j] = hidden[j] || !(square < kHidden) ? kHidden : square;
      }
      if (own[i] >= 0) d[own[i]] = kHidden;
      float best[kMost];
      int64_t* chosen = nearest + i * wanted;
      long held = 0;
      for (long j = 0; j < padded; j += kBlock) {
        float least = INFINITY;
#pragma omp simd reduction(min : least)
        for (long k = j; k < j + kBlock; ++k) least = d[k] < least ? d[k] : least;
        if (held == wanted && !(least < best[wanted - 1])) continue;
        for (long k = j; k < j + kBlock && k < count; ++k) {
          if (held == wanted && !(d[k] < best[wanted - 1])) continue;
          long at = held < wanted ? held++ : wanted - 1;
          for (; at > 0 && best[at - 1] > d[k]; --at) best[at] = best[at - 1], chosen[at] = chosen[at - 1];
          best[at] = d[k], chosen[at] = k;
        }
      }
      memcpy(distances + i * wanted, best, sizeof(float) * wanted);
    }
  }
}
