// What all kernels share: vectors as wide as the target's registers, by the compiler's extensions, and the exponential.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr long kLanes = 16, kTileRows = 8;
#elif defined(__AVX__)
constexpr long kLanes = 8, kTileRows = 6;
#elif defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS == 256
constexpr long kLanes = 8, kTileRows = 8;
#else
constexpr long kLanes = 4, kTileRows = 8;
#endif
constexpr long kTileColumns = 2 * kLanes;

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

// e^x where it is an ordinary number, else the nearest of them.
inline float bounded_exponential(float x) { return exponential(x < -80.0f ? -80.0f : x > 87.0f ? 87.0f : x); }

// Which of 16 numbers are above those at `least`, as bits.
inline uint32_t above(const float* x, const float* least) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(_mm512_loadu_ps(x), _mm512_loadu_ps(least), _CMP_GT_OQ);
#elif defined(__AVX2__)
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(x), _mm256_loadu_ps(least), _CMP_GT_OQ));
  const int high = _mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(x + 8), _mm256_loadu_ps(least + 8), _CMP_GT_OQ));
  return (uint32_t)(low | high << 8);
#else
  int any = 0;
  for (long c = 0; c < 16; ++c) any |= x[c] > least[c];
  if (!any) return 0;
  uint32_t bits = 0;
  for (long c = 0; c < 16; ++c) bits |= (uint32_t)(x[c] > least[c]) << c;
  return bits;
#endif
}

}  // namespace
