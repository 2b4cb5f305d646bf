// The front end's maps, channels side by side: the sum of a map and an enlarged coarser one, scores of pixels, their
// peaks, and samples at points.
#include "map_rows.h"

namespace {

// fine + coarse enlarged twice; coarse is (height, width, channels).
template <typename Number>
void add_enlarged(const Number* fine, const Number* coarse, long height, long width, long channels, Number* out,
                  int threads) {
  const long row = 2 * width * channels;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> mixed(width * channels);
#pragma omp for schedule(static)
    for (long y = 0; y < 2 * height; ++y)
      add_enlarged_row(fine + y * row, coarse, y, height, width, channels, mixed.data(), out + y * row);
  }
}

// A convolution by 3 × 3 of maps (height, width, channels) to 4 numbers, which are the 2 × 2 pixels of twice the
// resolution. Weights (4, 3, 3, channels), bias (4).
template <typename Number>
void score_pixels(const Number* maps, long height, long width, long channels, const float* weights, const float* bias,
                  float* out, int threads) {
#pragma omp parallel num_threads(threads)
  {
    Planes planes(width, channels);
    long held[3] = {-2, -2, -2};  // which row each of the three is
#pragma omp for schedule(static)
    for (long y = 0; y < height; ++y) {
      long slots[3];
      for (long k = 0; k < 3; ++k) {
        const long from = y + k - 1, slot = slots[k] = (from + 3) % 3;
        if (held[slot] == from) continue;
        if (from < 0 || from >= height)
          planes.clear(slot);
        else
          planes.spread(maps + from * width * channels, slot);
        held[slot] = from;
      }
      planes.score(slots, weights, bias, out + 4 * y * width);
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
                              int64_t* points, long room) {
  const long side = 2 * radius + 1;
  std::vector<float> padded(width + 2 * radius, -INFINITY), rows(side * width, -INFINITY), top(width);
  long count = 0;
  for (long y = 0; y < height + radius; ++y) {
    float* row = rows.data() + y % side * width;
    if (y < height) {
      std::copy_n(scores + y * stride, width, padded.data() + radius);
      largest_of_window(padded.data(), width, radius, row);
    } else {
      std::fill_n(row, width, -INFINITY);
    }
    const long centre = y - radius;
    if (centre < border || centre >= height - border) continue;
    std::copy_n(rows.data(), width, top.data());
    for (long k = 1; k < side; ++k)
#pragma omp simd
      for (long x = 0; x < width; ++x) top[x] = rows[k * width + x] > top[x] ? rows[k * width + x] : top[x];
    const float* own = scores + centre * stride;
    for (long x = border; x < width - border; ++x) {
      if (own[x] != top[x]) continue;
      if (count < room) points[2 * count] = x, points[2 * count + 1] = centre;
      ++count;
    }
  }
  return count;
}
