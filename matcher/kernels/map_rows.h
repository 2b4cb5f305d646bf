// Rows of the front end's maps, channels side by side.
#pragma once
#include <algorithm>
#include <vector>

#include "numbers.h"
#include "vectors.h"

namespace {

// Row y of a coarse map (height, width, channels) enlarged twice, bilinear between pixel centres, plus a row of the
// fine one; `mixed` has room for a row of the coarse one.
template <typename Number>
void add_enlarged_row(const Number* fine, const Number* coarse, long y, long height, long width, long channels,
                      float* mixed, Number* out) {
  const long row = width * channels, near = y / 2, far = std::min(std::max(near + (y % 2 ? 1 : -1), 0L), height - 1);
  const Number *a = coarse + near * row, *b = coarse + far * row;
  long c = 0;
  for (; c + kLanes <= row; c += kLanes) store(0.75f * load(a + c) + 0.25f * load(b + c), mixed + c);
  for (; c < row; ++c) mixed[c] = 0.75f * wide(a[c]) + 0.25f * wide(b[c]);
  for (long x = 0; x < 2 * width; ++x) {
    const long beside = std::min(std::max(x / 2 + (x % 2 ? 1 : -1), 0L), width - 1);
    const float *own = mixed + x / 2 * channels, *other = mixed + beside * channels;
    const Number* from = fine + x * channels;
    Number* to = out + x * channels;
    for (c = 0; c + kLanes <= channels; c += kLanes)
      store(load(from + c) + 0.75f * load(own + c) + 0.25f * load(other + c), to + c);
    for (; c < channels; ++c) store(wide(from[c]) + 0.75f * own[c] + 0.25f * other[c], to + c);
  }
}

// The numbers that three rows of a map (width, channels), and what lies beyond their ends, are spread to: one row a
// channel.
class Planes {
 public:
  static constexpr long kStep = 2 * kLanes;  // pixels at a time: two sums of each number hide the latency of one

  Planes(long width, long channels)
      : width_(width), channels_(channels), stride_((width + 2 + kStep) / kLanes * kLanes + kLanes),
        planes_(3 * channels * stride_) {}

  template <typename Number>
  void spread(const Number* row, long slot) {
    float* plane = planes_.data() + slot * channels_ * stride_;
    for (long x = 0; x < width_; ++x)
      for (long c = 0; c < channels_; ++c) plane[c * stride_ + x + 1] = wide(row[x * channels_ + c]);
  }

  void clear(long slot) { std::fill_n(planes_.data() + slot * channels_ * stride_, channels_ * stride_, 0.0f); }

  // A convolution by 3 × 3 of the rows in these slots to 4 numbers, which are 2 × 2 pixels of `out` (2, 2 · width).
  // Weights (4, 3, 3, channels), bias (4).
  void score(const long* slots, const float* weights, const float* bias, float* out) const {
    for (long x = 0; x < width_; x += kStep) {
      Floats sums[4][2];
      for (long o = 0; o < 4; ++o) sums[o][0] = sums[o][1] = Floats{} + bias[o];
      for (long k = 0; k < 9; ++k)
        for (long c = 0; c < channels_; ++c) {
          const float* from = planes_.data() + (slots[k / 3] * channels_ + c) * stride_ + x + k % 3;
          const Floats first = load(from), second = load(from + kLanes);
          for (long o = 0; o < 4; ++o) {
            const float weight = weights[(o * 9 + k) * channels_ + c];
            sums[o][0] += weight * first;
            sums[o][1] += weight * second;
          }
        }
      for (long o = 0; o < 4; ++o)
        for (long pixel = 0; pixel < std::min(kStep, width_ - x); ++pixel)
          out[o / 2 * 2 * width_ + 2 * (x + pixel) + o % 2] = sums[o][pixel / kLanes][pixel % kLanes];
    }
  }

 private:
  long width_, channels_, stride_;
  std::vector<float> planes_;
};

}  // namespace
