// Numbers of maps and rows: float32, or bfloat16, which is the upper half of one.
#pragma once
#include <cstdint>
#include <cstring>

namespace {

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

}  // namespace
