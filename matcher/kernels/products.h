// Products of float32 matrices: a tile of vector registers at a time, or on AMX's matrix unit as three products in
// bfloat16, of which every factor is a sum of two: to 16 bits.
#pragma once
#include <algorithm>
#include <vector>

#include "vectors.h"
#ifdef __AMX_BF16__
#include "tiles.h"
#endif

namespace {

#ifdef __AMX_BF16__

constexpr long kPanel = 32;  // columns that are packed together

inline uint16_t half(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float whole(uint16_t bits) {
  const uint32_t all = (uint32_t)bits << 16;
  float x;
  memcpy(&x, &all, 4);
  return x;
}

// 32 rows or columns of floats as tiles: for every 32 channels the upper parts of the first 16 rows and of the others,
// then the lower parts. `turned`: as tiles of pairs of channels by columns.
inline void split(const float* rows, long count, long width, bool turned, uint16_t* to) {
  for (long c = 0; c < width; c += 32, to += 4 * 512) {
    memset(to, 0, 4 * 1024);
    const long channels = std::min(32L, width - c);
    for (long r = 0; r < count; ++r)
      for (long k = 0; k < channels; ++k) {
        const float x = rows[r * width + c + k];
        const uint16_t upper = half(x);
        const long at = r / 16 * 512 + (turned ? k / 2 * 32 + r % 16 * 2 + k % 2 : r % 16 * 32 + k);
        to[at] = upper;
        to[1024 + at] = half(x - whole(upper));
      }
  }
}

// Rows (n, width) times packed columns.
class Product {
 public:
  Product(const float* right, long count, long width)
      : right_(right), count_(count), width_(width), size_((width + 31) / 32 * 4 * 512), packed_(panels() * size_) {}

  long panels() const { return (count_ + kPanel - 1) / kPanel; }

  void pack(long panel) {
    const long first = panel * kPanel;
    split(right_ + first * width_, std::min(kPanel, count_ - first), width_, true, packed_.data() + panel * size_);
  }

  // out (rows up to a multiple of 32, panels() · kPanel) = left (rows, width) times what is packed.
  void multiply(const float* left, long rows, std::vector<uint16_t>& scratch, float* out, long stride) const {
    scratch.resize((rows + 31) / 32 * size_);
    for (long r = 0; r < rows; r += 32)
      split(left + r * width_, std::min(32L, rows - r), width_, false, scratch.data() + r / 32 * size_);
    for (long p = 0; p < panels(); ++p)
      for (long r = 0; r < rows; r += 32)
        multiply_tiles(scratch.data() + r / 32 * size_, packed_.data() + p * size_, out + r * stride + p * kPanel, stride);
  }

  static void begin() { configure_tiles(); }
  static void end() { _tile_release(); }
  typedef std::vector<uint16_t> Scratch;

 private:
  // 32 by 32: upper times upper, upper times lower, lower times upper; the fourth is below what 16 bits hold.
  void multiply_tiles(const uint16_t* row, const uint16_t* column, float* out, long stride) const {
    settle();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (const uint16_t* end = row + size_; row < end; row += 2048, column += 2048) {
      _tile_loadd(4, row, 64);
      _tile_loadd(5, row + 512, 64);
      _tile_loadd(6, column + 1024, 64);
      _tile_loadd(7, column + 1536, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      _tile_loadd(6, column, 64);
      _tile_loadd(7, column + 512, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      _tile_loadd(4, row + 1024, 64);
      _tile_loadd(5, row + 1536, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, 4 * stride);
    _tile_stored(1, out + 16, 4 * stride);
    _tile_stored(2, out + 16 * stride, 4 * stride);
    _tile_stored(3, out + 16 * stride + 16, 4 * stride);
  }

  const float* right_;
  long count_, width_, size_;
  std::vector<uint16_t> packed_;
};

#else

constexpr long kPanel = 2 * kLanes;

template <long kRows>
inline void tile(const float* left, long stride, const float* panel, long width, float* out, long out_stride) {
  Floats sums[kRows][2] = {};
  for (long c = 0; c < width; ++c, panel += kPanel) {
    const Floats first = load(panel), second = load(panel + kLanes);
#pragma GCC unroll 8
    for (long r = 0; r < kRows; ++r) {
      const float x = left[r * stride + c];
      sums[r][0] += x * first;
      sums[r][1] += x * second;
    }
  }
  for (long r = 0; r < kRows; ++r) {
    store(sums[r][0], out + r * out_stride);
    store(sums[r][1], out + r * out_stride + kLanes);
  }
}

// Rows (n, width) times packed columns.
class Product {
 public:
  Product(const float* right, long count, long width)
      : right_(right), count_(count), width_(width), packed_(panels() * kPanel * width) {}

  long panels() const { return (count_ + kPanel - 1) / kPanel; }

  void pack(long panel) {
    float* to = packed_.data() + panel * kPanel * width_;
    for (long n = 0; n < kPanel && panel * kPanel + n < count_; ++n)
      for (long c = 0; c < width_; ++c) to[c * kPanel + n] = right_[(panel * kPanel + n) * width_ + c];
  }

  // out (rows, panels() · kPanel) = left (rows, width) times what is packed.
  void multiply(const float* left, long rows, std::vector<float>&, float* out, long stride) const {
    const float* panel = packed_.data();
    for (long p = 0; p < panels(); ++p, panel += width_ * kPanel, out += kPanel) {
      long r = 0;
      for (; r + kTileRows <= rows; r += kTileRows)
        tile<kTileRows>(left + r * width_, width_, panel, width_, out + r * stride, stride);
      for (; r < rows; ++r) tile<1>(left + r * width_, width_, panel, width_, out + r * stride, stride);
    }
  }

  static void begin() {}
  static void end() {}
  typedef std::vector<float> Scratch;

 private:
  const float* right_;
  long count_, width_;
  std::vector<float> packed_;
};

#endif

}  // namespace
