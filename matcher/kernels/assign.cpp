// Assignment: the kernel of a dense transport problem.
#include "vectors.h"

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
