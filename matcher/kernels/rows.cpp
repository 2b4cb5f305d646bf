// What happens to rows of a block between its matrix products, in float32 or bfloat16, each row once through a
// core's registers: layer normalisation with GELU, and the turning of queries and keys by their positions.
// Plain loops, which the compiler turns into vector instructions.
#include <cmath>

#include "numbers.h"

namespace {

constexpr long kWidest = 4096;  // channels of a row

// x Φ(x), Φ from a polynomial in x² for erf(x / √2) / x, fitted up to `farthest` for the least error of x Φ(x).
template <int kDegree>
struct Gelu {
  float farthest, power[kDegree + 1];  // of 2 x² / farthest² − 1

  float operator()(float x) const {
    const float y = x < -farthest ? -farthest : x > farthest ? farthest : x;
    const float t = y * y * (2 / (farthest * farthest)) - 1;
    float p = power[kDegree];
    for (int k = kDegree - 1; k >= 0; --k) p = p * t + power[k];
    return 0.5f * x + 0.5f * x * (p * y);
  }
};

// Exact to 7e-7, as float32 allows.
constexpr Gelu<15> gelu(float) {
  return {5.5f, {0.25710386f, -0.12834468f, 0.0954749f, -0.07758483f, 0.06414747f, -0.05210776f, 0.04067907f,
                 -0.0299273f, 0.02062478f, -0.01386057f, 0.0089542f, -0.00447932f, 0.00168293f, -0.00134739f,
                 0.00118392f, -0.00038109f}};
}

// Exact to 3e-4 up to |x| = 10, a tenth of a step of bfloat16 where values are of the order of 1, and to 3e-5 |x|
// beyond.
constexpr Gelu<8> gelu(Half) {
  return {4.0f, {0.35189793f, -0.16863437f, 0.11193982f, -0.0739237f, 0.04460035f, -0.02397847f, 0.01317487f,
                 -0.007352f, 0.00226064f}};
}

template <typename Number>
void normalise_gelu(Number* x, long rows, long columns, const float* bias, const float* gain, const float* shift,
                    float epsilon, int threads) {
  constexpr auto activate = gelu(Number());
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long i = 0; i < rows; ++i) {
    Number* row = x + i * columns;
    alignas(64) float values[kWidest];
    float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
    for (long c = 0; c < columns; ++c) sum += values[c] = wide(row[c]) + bias[c];
    const float mean = sum / columns;
#pragma omp simd reduction(+ : squares)
    for (long c = 0; c < columns; ++c) squares += (values[c] - mean) * (values[c] - mean);
    const float scale = 1.0f / std::sqrt(squares / columns + epsilon);
#pragma omp simd
    for (long c = 0; c < columns; ++c)
      store(activate((values[c] - mean) * scale * gain[c] + shift[c]), row + c);
  }
}

template <typename Number>
void add(const float* x, const Number* update, long rows, long columns, const float* bias, float* out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long i = 0; i < rows; ++i) {
    const long first = i * columns;
#pragma omp simd
    for (long c = 0; c < columns; ++c) out[first + c] = x[first + c] + wide(update[first + c]) + bias[c];
  }
}

template <typename Number>
void turn(Number* x, long rows, long heads, long pairs, long others, const float* bias, const float* turns,
          int threads) {
  const long turned = 2 * heads * pairs, columns = turned + others;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long i = 0; i < rows; ++i) {
    Number* row = x + i * columns;
    const float *cosine = turns + 2 * i * pairs, *sine = cosine + pairs;
    for (long h = 0; h < heads; ++h) {
      Number* head = row + 2 * h * pairs;
      const float* shift = bias + 2 * h * pairs;
#pragma omp simd
      for (long c = 0; c < pairs; ++c) {
        const float real = wide(head[2 * c]) + shift[2 * c], imaginary = wide(head[2 * c + 1]) + shift[2 * c + 1];
        store(real * cosine[c] - imaginary * sine[c], head + 2 * c);
        store(real * sine[c] + imaginary * cosine[c], head + 2 * c + 1);
      }
    }
#pragma omp simd
    for (long c = turned; c < columns; ++c) store(wide(row[c]) + bias[c], row + c);
  }
}

}  // namespace

// Rows (rows, columns) without gaps → gelu(layer normalisation of row + bias), in place; `half`: bfloat16, else
// float32.
extern "C" void matcher_normalise_gelu(void* x, int half, long rows, long columns, const float* bias,
                                       const float* gain, const float* shift, float epsilon, int threads) {
  if (half)
    normalise_gelu((Half*)x, rows, columns, bias, gain, shift, epsilon, threads);
  else
    normalise_gelu((float*)x, rows, columns, bias, gain, shift, epsilon, threads);
}

// out = x + update + bias, rows without gaps; `half`: the update is bfloat16, else float32 as all others.
extern "C" void matcher_add(const float* x, const void* update, int half, long rows, long columns,
                            const float* bias, float* out, int threads) {
  if (half)
    add(x, (const Half*)update, rows, columns, bias, out, threads);
  else
    add(x, (const float*)update, rows, columns, bias, out, threads);
}

// Rows of `heads` heads of `pairs` complex numbers and `others` more numbers, without gaps, in place: row + bias,
// of which the heads are multiplied by `turns` (rows, 2, pairs), real parts, then imaginary ones.
extern "C" void matcher_turn(void* x, int half, long rows, long heads, long pairs, long others, const float* bias,
                             const float* turns, int threads) {
  if (half)
    turn((Half*)x, rows, heads, pairs, others, bias, turns, threads);
  else
    turn((float*)x, rows, heads, pairs, others, bias, turns, threads);
}
