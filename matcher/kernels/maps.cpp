// The front end's maps, channels side by side: the sum of a map and an enlarged coarser one, scores of pixels, their
// peaks, and samples at points.
#include <algorithm>
#include <vector>

#include "numbers.h"
#include "vectors.h"

namespace {

// fine + coarse enlarged twice, bilinear between pixel centres; coarse is (height, width, channels).
template <typename Number>
void add_enlarged(const Number* fine, const Number* coarse, long height, long width, long channels, Number* out,
                  int threads) {
  const long row = width * channels;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> mixed(row);
#pragma omp for schedule(static)
    for (long y = 0; y < 2 * height; ++y) {
      const long near = y / 2, far = std::min(std::max(near + (y % 2 ? 1 : -1), 0L), height - 1);
      const Number *a = coarse + near * row, *b = coarse + far * row;
#pragma omp simd
      for (long c = 0; c < row; ++c) mixed[c] = 0.75f * wide(a[c]) + 0.25f * wide(b[c]);
      for (long x = 0; x < 2 * width; ++x) {
        const long beside = std::min(std::max(x / 2 + (x % 2 ? 1 : -1), 0L), width - 1);
        const float *own = mixed.data() + x / 2 * channels, *other = mixed.data() + beside * channels;
        const long at = (y * 2 * width + x) * channels;
#pragma omp simd
        for (long c = 0; c < channels; ++c) store(wide(fine[at + c]) + 0.75f * own[c] + 0.25f * other[c], out + at + c);
      }
    }
  }
}

// A row of maps (width, channels) as one row a channel, which begins with the edge.
template <typename Number>
void spread_channels(const Number* row, long width, long channels, long stride, float* plane) {
  for (long x = 0; x < width; ++x)
    for (long c = 0; c < channels; ++c) plane[c * stride + x + 1] = wide(row[x * channels + c]);
}

// A convolution by 3 × 3 of maps (height, width, channels) to 4 numbers, which are the 2 × 2 pixels of twice the
// resolution. Weights (4, 3, 3, channels), bias (4).
template <typename Number>
void score_pixels(const Number* maps, long height, long width, long channels, const float* weights, const float* bias,
                  float* out, int threads) {
  constexpr long kStep = 2 * kLanes;  // pixels at a time: two sums of each number hide the latency of one
  const long stride = (width + 2 + kStep) / kLanes * kLanes + kLanes;  // of a channel's row, with its edges
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> planes(3 * channels * stride);
    long held[3] = {-2, -2, -2};  // which row each of the three is
#pragma omp for schedule(static)
    for (long y = 0; y < height; ++y) {
      const float* lines[3];
      for (long k = 0; k < 3; ++k) {
        const long from = y + k - 1, slot = (from + 3) % 3;
        float* plane = planes.data() + slot * channels * stride;
        lines[k] = plane;
        if (held[slot] == from) continue;
        if (from < 0 || from >= height)
          std::fill_n(plane, channels * stride, 0.0f);
        else
          spread_channels(maps + from * width * channels, width, channels, stride, plane);
        held[slot] = from;
      }
      for (long x = 0; x < width; x += kStep) {
        Floats sums[4][2];
        for (long o = 0; o < 4; ++o) sums[o][0] = sums[o][1] = Floats{} + bias[o];
        for (long k = 0; k < 9; ++k)
          for (long c = 0; c < channels; ++c) {
            const float* from = lines[k / 3] + c * stride + x + k % 3;
            const Floats first = load(from), second = load(from + kLanes);
            for (long o = 0; o < 4; ++o) {
              const float weight = weights[(o * 9 + k) * channels + c];
              sums[o][0] += weight * first;
              sums[o][1] += weight * second;
            }
          }
        for (long o = 0; o < 4; ++o)
          for (long pixel = 0; pixel < std::min(kStep, width - x); ++pixel)
            out[(2 * y + o / 2) * 2 * width + 2 * (x + pixel) + o % 2] = sums[o][pixel / kLanes][pixel % kLanes];
      }
    }
  }
}

template <typename Number>
void sample(const Number* maps, long height, long width, long channels, const float* points, long count, float scale,
            float* out, long stride, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long i = 0; i < count; ++i) {
    const float x = std::min(std::max(points[2 * i] * scale, 0.0f), (float)(width - 1));
    const float y = std::min(std::max(points[2 * i + 1] * scale, 0.0f), (float)(height - 1));
    const long left = (long)x, top = (long)y, right = std::min(left + 1, width - 1), low = std::min(top + 1, height - 1);
    const float dx = x - left, dy = y - top;
    const Number *a = maps + (top * width + left) * channels, *b = maps + (top * width + right) * channels;
    const Number *c = maps + (low * width + left) * channels, *d = maps + (low * width + right) * channels;
    float* to = out + i * stride;
#pragma omp simd
    for (long k = 0; k < channels; ++k) {
      const float upper = wide(a[k]) + dx * (wide(b[k]) - wide(a[k]));
      const float lower = wide(c[k]) + dx * (wide(d[k]) - wide(c[k]));
      to[k] = upper + dy * (lower - upper);
    }
  }
}

// The largest of every 2 · radius + 1 neighbouring numbers of a row that has `radius` of −∞ on either side.
void largest_of_window(const float* padded, long count, long radius, float* out) {
#pragma omp simd
  for (long x = 0; x < count; ++x) out[x] = padded[x];
  for (long k = 1; k <= 2 * radius; ++k)
#pragma omp simd
    for (long x = 0; x < count; ++x) out[x] = padded[x + k] > out[x] ? padded[x + k] : out[x];
}

// x and y of the peaks in the rows from `from` up to `to`; arguments otherwise as of `matcher_peaks`.
void peaks_of_rows(const float* scores, long height, long width, long stride, long radius, long border, long from,
                   long to, std::vector<int64_t>& points) {
  const long side = 2 * radius + 1;
  std::vector<float> padded(width + 2 * radius, -INFINITY), rows(side * width, -INFINITY), top(width);
  for (long y = std::max(from - radius, 0L); y < to + radius; ++y) {
    float* row = rows.data() + y % side * width;
    if (y < height) {
      std::copy_n(scores + y * stride, width, padded.data() + radius);
      largest_of_window(padded.data(), width, radius, row);
    } else {
      std::fill_n(row, width, -INFINITY);
    }
    const long centre = y - radius;
    if (centre < from) continue;
    std::copy_n(rows.data(), width, top.data());
    for (long k = 1; k < side; ++k)
#pragma omp simd
      for (long x = 0; x < width; ++x) top[x] = rows[k * width + x] > top[x] ? rows[k * width + x] : top[x];
    const float* own = scores + centre * stride;
    for (long x = border; x < width - border; ++x)
      if (own[x] == top[x]) points.push_back(x), points.push_back(centre);
  }
}

}  // namespace

extern "C" void matcher_add_enlarged(const void* fine, const void* coarse, int half, long height, long width,
                                     long channels, void* out, int threads) {
  if (half)
    add_enlarged((const Half*)fine, (const Half*)coarse, height, width, channels, (Half*)out, threads);
  else
    add_enlarged((const float*)fine, (const float*)coarse, height, width, channels, (float*)out, threads);
}

extern "C" void matcher_score_pixels(const void* maps, int half, long height, long width, long channels,
                                     const float* weights, const float* bias, float* out, int threads) {
  if (half)
    score_pixels((const Half*)maps, height, width, channels, weights, bias, out, threads);
  else
    score_pixels((const float*)maps, height, width, channels, weights, bias, out, threads);
}

// Maps (height, width, channels) at points (count, 2) xy times `scale`, bilinear, those beyond the edge as on it, to
// rows of out with `stride` between them.
extern "C" void matcher_sample(const void* maps, int half, long height, long width, long channels, const float* points,
                               long count, float scale, float* out, long stride, int threads) {
  if (half)
    sample((const Half*)maps, height, width, channels, points, count, scale, out, stride, threads);
  else
    sample((const float*)maps, height, width, channels, points, count, scale, out, stride, threads);
}

// Pixels of (height, width), `stride` from row to row, that are the largest within `radius` in x and y and at least
// `border` away from the edge, in their order: x and y of the first `room` of them. Returns how many there are.
extern "C" long matcher_peaks(const float* scores, long height, long width, long stride, long radius, long border,
                              int64_t* points, long room, int threads) {
  const long rows = std::max(height - 2 * border, 0L);
  std::vector<std::vector<int64_t>> found(threads);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int t = 0; t < threads; ++t)
    peaks_of_rows(scores, height, width, stride, radius, border, border + rows * t / threads,
                  border + rows * (t + 1) / threads, found[t]);
  long count = 0;
  for (const auto& part : found) {
    if (count < room) std::copy_n(part.data(), 2 * std::min<long>(part.size() / 2, room - count), points + 2 * count);
    count += part.size() / 2;
  }
  return count;
}
