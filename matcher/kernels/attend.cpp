// Softmax attention in bfloat16 on processors with AMX. The scores, weights and messages of 32 queries at a
// time stay in the cache. Where the lengths of queries and keys bound the scores, no maximum is subtracted;
// else it is found first, and the scores are computed twice.
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "tiles.h"

namespace {

constexpr long kQueries = 32, kKeys = 32, kWidest = 128;
constexpr float kSafeExponent = 80.0f;  // exponentials and their sums are ordinary numbers
constexpr float kLog2e = 1.44269504f;

struct Rows {  // heads of `width` channels: head h of row i begins at first + i * row + h * head
  const uint16_t* first;
  long count, row, head;
  const uint16_t* at(long h, long i) const { return first + i * row + h * head; }
};

// 2^x to a relative error of 7.5e-5, a fiftieth of a step of bfloat16.
inline __m512 exp2_ps(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, 0x09);  // x - floor(x)
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.07802452f), f, _mm512_set1_ps(0.22606716f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.69583354f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.99992522f));
  return _mm512_scalef_ps(p, x);
}

// The greatest squared length of a row of one head; not a number if one is not.
float longest(const Rows& x, long h, long width) {
  float most = 0.0f;
  for (long i = 0; i < x.count; ++i) {
    __m512 sum = _mm512_setzero_ps();
    for (long c = 0; c < width; c += 32) {
      const __m512bh y = (__m512bh)_mm512_loadu_si512(x.at(h, i) + c);
      sum = _mm512_dpbf16_ps(sum, y, y);
    }
    const float length = _mm512_reduce_add_ps(sum);
    if (!(length <= most)) most = length;
    if (std::isnan(length)) return length;
  }
  return most;
}

// Keys as tiles of 16 pairs of channels by 16 keys; beyond the last key zeros.
void pack_keys(const Rows& k, long h, long padded, long width, uint32_t* out) {
  for (long j = 0; j < padded; j += 16)
    for (long c = 0; c < width / 2; c += 16, out += 256)
      for (long n = 0; n < 16; ++n)
        for (long r = 0; r < 16; ++r) {
          uint32_t pair = 0;
          if (j + n < k.count) memcpy(&pair, k.at(h, j + n) + 2 * (c + r), 4);
          out[r * 16 + n] = pair;
        }
}

// Values as tiles of 16 pairs of keys by 16 channels, one block of channels after the other.
void pack_values(const Rows& v, long h, long padded, long width, uint32_t* out) {
  for (long c = 0; c < width; c += 16)
    for (long j = 0; j < padded; j += 2, out += 16) {
      __m512i pair[2];
      for (long s = 0; s < 2; ++s) {
        const bool there = j + s < v.count;
        const __m256i x = there ? _mm256_loadu_si256((const __m256i*)(v.at(h, j + s) + c)) : _mm256_setzero_si256();
        pair[s] = _mm512_cvtepu16_epi32(x);
      }
      _mm512_storeu_si512(out, _mm512_or_si512(pair[0], _mm512_slli_epi32(pair[1], 16)));
    }
}

// Products of 32 queries (rows of `width` channels) and 32 packed keys, as four tiles of 16 by 16.
inline void score(const uint16_t* query, const uint16_t* key, long width, float* scores) {
  settle();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (long c = 0; c < width; c += 32) {
    _tile_loadd(4, query + c, 2 * width);
    _tile_loadd(5, query + 16 * width + c, 2 * width);
    _tile_loadd(6, key + c * 16, 64);
    _tile_loadd(7, key + 16 * width + c * 16, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, scores, 64);
  _tile_stored(1, scores + 256, 64);
  _tile_stored(2, scores + 512, 64);
  _tile_stored(3, scores + 768, 64);
}

// 16 rows of 32 products as a tile of weights, less what `shifts` takes off each row, whose sums are added to
// `total`; masked ones weigh nothing.
template <bool kMasked>
inline void weigh(const float* scores, uint16_t* weights, float scale, const float* shifts, float* total,
                  uint32_t mask) {
  const __m512 s = _mm512_set1_ps(scale);
  for (int r = 0; r < 16; ++r) {
    const __m512 shift = _mm512_set1_ps(shifts[r]);
    __m512 a = exp2_ps(_mm512_fmsub_ps(s, _mm512_load_ps(scores + r * 16), shift));
    __m512 b = exp2_ps(_mm512_fmsub_ps(s, _mm512_load_ps(scores + 256 + r * 16), shift));
    if (kMasked) {
      a = _mm512_maskz_mov_ps(mask & 0xffff, a);
      b = _mm512_maskz_mov_ps(mask >> 16, b);
    }
    _mm512_store_si512(weights + r * 32, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    _mm512_store_ps(total + r * 16, _mm512_add_ps(_mm512_load_ps(total + r * 16), _mm512_add_ps(a, b)));
  }
}

// The greatest scores of 32 queries, times `scale`.
void find_greatest(const uint16_t* query, const uint16_t* keys, long m, long padded, long width, float scale,
                   float* greatest) {
  alignas(64) float scores[1024], most[kQueries * 16];
  for (float& x : most) x = -INFINITY;
  for (long j = 0; j < padded; j += kKeys) {
    score(query, keys + j * width, width, scores);
    const uint32_t there = m - j >= kKeys ? ~0u : (1u << (m - j)) - 1;
    for (long r = 0; r < kQueries; ++r) {
      const float* row = scores + r / 16 * 512 + r % 16 * 16;
      __m512 x = _mm512_load_ps(most + r * 16);
      x = _mm512_mask_max_ps(x, there & 0xffff, x, _mm512_load_ps(row));
      _mm512_store_ps(most + r * 16, _mm512_mask_max_ps(x, there >> 16, x, _mm512_load_ps(row + 256)));
    }
  }
  for (long r = 0; r < kQueries; ++r) greatest[r] = scale * _mm512_reduce_max_ps(_mm512_load_ps(most + r * 16));
}

// Weights of 32 queries by all keys as tiles of 16 by 32, and their sums.
void weigh_all(const uint16_t* query, const uint16_t* keys, long m, long padded, long width, float scale,
               const float* shifts, uint16_t* weights, float* sums) {
  alignas(64) float scores[2][1024], total[2][256] = {};
  score(query, keys, width, scores[0]);
  for (long j = 0; j < padded; j += kKeys) {
    // The next scores are under way in the matrix unit while the vector units weigh these.
    const float* ready = scores[j / kKeys % 2];
    if (j + kKeys < padded) score(query, keys + (j + kKeys) * width, width, scores[(j / kKeys + 1) % 2]);
    uint16_t *upper = weights + 16 * j, *lower = weights + 16 * (padded + j);
    if (m - j >= kKeys) {
      weigh<false>(ready, upper, scale, shifts, total[0], 0);
      weigh<false>(ready + 512, lower, scale, shifts + 16, total[1], 0);
    } else {
      const uint32_t mask = (1u << (m - j)) - 1;
      weigh<true>(ready, upper, scale, shifts, total[0], mask);
      weigh<true>(ready + 512, lower, scale, shifts + 16, total[1], mask);
    }
  }
  for (long r = 0; r < kQueries; ++r) sums[r] = _mm512_reduce_add_ps(_mm512_load_ps(total[r / 16] + r % 16 * 16));
}

// Weighted sums of values, 32 rows of `width` channels.
void accumulate(const uint16_t* weights, const uint16_t* values, long padded, long width, float* message) {
  settle();
  for (long c = 0; c < width; c += 32) {
    const uint16_t* value = values + c * padded;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long j = 0; j < padded; j += kKeys, value += kKeys * 16) {
      _tile_loadd(4, weights + 16 * j, 64);
      _tile_loadd(5, weights + 16 * (padded + j), 64);
      _tile_loadd(6, value, 64);
      _tile_loadd(7, value + 16 * padded, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, message + c, 4 * width);
    _tile_stored(1, message + c + 16, 4 * width);
    _tile_stored(2, message + 16 * width + c, 4 * width);
    _tile_stored(3, message + 16 * width + c + 16, 4 * width);
  }
}

}  // namespace

// Ask the system for the matrix unit; 0 if it is granted.
extern "C" int matcher_prepare() { return (int)syscall(SYS_arch_prctl, 0x1023, 18); }

// out[h, i] = Σ_j exp(q_i · k_j / √width) v_j / Σ_j exp(…), for heads of `width` channels, a multiple of 32.
// Returns 0, or 1 and leaves `out` alone if a query or a key is not finite.
extern "C" int matcher_attend(const uint16_t* q, const uint16_t* k, const uint16_t* v, uint16_t* out,
                              const long* strides, long n, long m, long heads, long width, int threads) {
  const Rows query_rows{q, n, strides[0], strides[1]}, key_rows{k, m, strides[2], strides[3]};
  const Rows value_rows{v, m, strides[4], strides[5]};
  const long padded = (m + kKeys - 1) / kKeys * kKeys, blocks = (n + kQueries - 1) / kQueries;
  const float scale = 1.0f / std::sqrt((float)width);
  int large = 0, infinite = 0;
#pragma omp parallel for num_threads(threads) reduction(| : large, infinite)
  for (long h = 0; h < heads; ++h) {
    const float most = std::sqrt(longest(query_rows, h, width)) * std::sqrt(longest(key_rows, h, width));
    large |= !(most * scale < kSafeExponent);
    infinite |= !std::isfinite(most);
  }
  if (infinite) return 1;
  const long packed = padded * width;
  uint16_t* keys = (uint16_t*)aligned_alloc(64, 4 * packed * heads);
  uint16_t* values = keys + packed * heads;
#pragma omp parallel num_threads(threads)
  {
    configure_tiles();
    const unsigned int rounding = _mm_getcsr();
    _mm_setcsr(rounding | 0x8000);  // weights too small for ordinary numbers are 0; they would be slow
    uint16_t* weights = (uint16_t*)aligned_alloc(64, 2 * kQueries * padded);
    alignas(64) float sums[kQueries], shifts[kQueries] = {}, message[kQueries * kWidest];
    alignas(64) uint16_t query[kQueries * kWidest];
#pragma omp for schedule(static)
    for (long h = 0; h < heads; ++h) {
      pack_keys(key_rows, h, padded, width, (uint32_t*)(keys + h * packed));
      pack_values(value_rows, h, padded, width, (uint32_t*)(values + h * packed));
    }
#pragma omp for schedule(static)
    for (long task = 0; task < heads * blocks; ++task) {
      const long h = task / blocks, first = task % blocks * kQueries;
      const long rows = n - first < kQueries ? n - first : kQueries;
      for (long r = 0; r < kQueries; ++r) {
        if (r < rows)
          memcpy(query + r * width, query_rows.at(h, first + r), 2 * width);
        else
          memset(query + r * width, 0, 2 * width);
      }
      if (large) find_greatest(query, keys + h * packed, m, padded, width, scale * kLog2e, shifts);
      weigh_all(query, keys + h * packed, m, padded, width, scale * kLog2e, shifts, weights, sums);
      accumulate(weights, values + h * packed, padded, width, message);
      for (long r = 0; r < rows; ++r) {
        const __m512 share = _mm512_set1_ps(1.0f / sums[r]);
        for (long c = 0; c < width; c += 32) {
          const __m512 low = _mm512_mul_ps(_mm512_load_ps(message + r * width + c), share);
          const __m512 high = _mm512_mul_ps(_mm512_load_ps(message + r * width + c + 16), share);
          uint16_t* target = out + ((first + r) * heads + h) * width + c;
          _mm512_storeu_si512(target, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
      }
    }
    free(weights);
    _mm_setcsr(rounding);
    _tile_release();
  }
  free(keys);
  return 0;
}

#else  // without a matrix unit there is nothing to gain

extern "C" int matcher_prepare() { return 1; }

extern "C" int matcher_attend(const void*, const void*, const void*, void*, const long*, long, long, long, long, int) {
  return 1;
}

#endif
