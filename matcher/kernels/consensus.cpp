// Consensus: around every point an affine map fitted to the matches nearest to it, as `fit_local_maps` in
// matcher/match/network/consensus.py describes it. Points are taken by as many as a vector has numbers.
#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

constexpr long kNeighbours = 16;
constexpr float kScales[] = {0.2f, 0.08f, 0.03f, 0.015f};  // of residuals, one per pass
constexpr float kRidge = 1e-3f, kTiny = 1e-6f;
constexpr float kPerCell = 3.0f;  // matches

// The matches in the cells of a grid.
struct Grid {
  const float* positions;
  float x, y, size;
  long columns, rows;
  std::vector<int32_t> starts, matches;

  long column(float at) const { return std::min(std::max((long)((at - x) / size), 0L), columns - 1); }
  long row(float at) const { return std::min(std::max((long)((at - y) / size), 0L), rows - 1); }

  Grid(const float* all, const std::vector<int32_t>& chosen) : positions(all) {
    float right = -INFINITY, bottom = -INFINITY;
    x = y = INFINITY;
    for (int32_t k : chosen) {
      x = std::min(x, all[2 * k]), right = std::max(right, all[2 * k]);
      y = std::min(y, all[2 * k + 1]), bottom = std::max(bottom, all[2 * k + 1]);
    }
    const float width = right - x, height = bottom - y;
    size = std::max(std::sqrt(width * height * kPerCell / chosen.size()), std::max(width, height) / 256 + kTiny);
    columns = (long)(width / size) + 1, rows = (long)(height / size) + 1;
    starts.assign(columns * rows + 1, 0);
    for (int32_t k : chosen) ++starts[cell(k) + 1];
    for (long c = 0; c < columns * rows; ++c) starts[c + 1] += starts[c];
    std::vector<int32_t> next(starts.begin(), starts.end() - 1);
    matches.resize(chosen.size());
    for (int32_t k : chosen) matches[next[cell(k)]++] = k;
  }

  long cell(int32_t k) const { return row(positions[2 * k + 1]) * columns + column(positions[2 * k]); }

  // The matches nearest to point `own`, itself left out, nearest first: how many there are.
  long nearest(long own, float* squares, int32_t* found) const {
    const float px = positions[2 * own], py = positions[2 * own + 1];
    const long cx = column(px), cy = row(py);
    long held = 0;
    for (long ring = 0;; ++ring) {
      const long left = cx - ring, right = cx + ring, top = cy - ring, bottom = cy + ring;
      for (long j = std::max(top, 0L); j <= std::min(bottom, rows - 1); ++j) {
        const bool whole = j == top || j == bottom;
        for (long i = left; i <= right; i += whole || ring == 0 ? 1 : 2 * ring) {
          if (i < 0 || i >= columns) continue;
          for (long e = starts[j * columns + i]; e < starts[j * columns + i + 1]; ++e)
            if (matches[e] != own) held = insert(matches[e], px, py, held, squares, found);
        }
      }
      // No match outside of the cells that were seen is nearer than their edges.
      float reach = INFINITY;
      if (left > 0) reach = std::min(reach, px - (x + left * size));
      if (top > 0) reach = std::min(reach, py - (y + top * size));
      if (right < columns - 1) reach = std::min(reach, x + (right + 1) * size - px);
      if (bottom < rows - 1) reach = std::min(reach, y + (bottom + 1) * size - py);
      reach = std::max(reach - 1e-5f, 0.0f);  // rounding may put a match on the other side of an edge
      if (reach == INFINITY || (held == kNeighbours && squares[held - 1] <= reach * reach)) return held;
    }
  }

  long insert(int32_t k, float px, float py, long held, float* squares, int32_t* found) const {
    const float dx = positions[2 * k] - px, dy = positions[2 * k + 1] - py, square = dx * dx + dy * dy;
    if (held == kNeighbours && !(square < squares[held - 1])) return held;
    long at = held < kNeighbours ? held++ : held - 1;
    for (; at > 0 && squares[at - 1] > square; --at) squares[at] = squares[at - 1], found[at] = found[at - 1];
    squares[at] = square, found[at] = k;
    return held;
  }
};

typedef float Lanes[kLanes];

struct Neighbourhood {  // of as many points as a vector has numbers
  alignas(64) Lanes points[4][kNeighbours];  // steps x and y, targets x and y
  alignas(64) Lanes base[kNeighbours];       // weights
};

// y ≈ A x + b, robustly; what it predicts at x = 0.
void fit(const Neighbourhood& around, Lanes* position, float* support, float* spread) {
  Floats weight[kNeighbours], square[kNeighbours], total, position_x, position_y;
  for (long k = 0; k < kNeighbours; ++k) weight[k] = load(around.base[k]);
  for (float scale : kScales) {
    Floats sum = {}, means[4] = {}, xx0 = {}, xx1 = {}, xy = {}, along[2][2] = {};
    for (long k = 0; k < kNeighbours; ++k) sum += weight[k];
    const Floats unit = 1.0f / (sum + kTiny);
    for (long k = 0; k < kNeighbours; ++k)
      for (long c = 0; c < 4; ++c) means[c] += weight[k] * unit * load(around.points[c][k]);
    for (long k = 0; k < kNeighbours; ++k) {
      Floats offset[4];
      for (long c = 0; c < 4; ++c) offset[c] = load(around.points[c][k]) - means[c];
      const Floats first = weight[k] * unit * offset[0], second = weight[k] * unit * offset[1];
      xx0 += first * offset[0], xy += first * offset[1], xx1 += second * offset[1];
      for (long c = 0; c < 2; ++c) along[0][c] += first * offset[2 + c], along[1][c] += second * offset[2 + c];
    }
    xx0 += kRidge, xx1 += kRidge;
    const Floats inverse = 1.0f / (xx0 * xx1 - xy * xy);
    Floats slope[2][2];
    for (long c = 0; c < 2; ++c) {
      slope[0][c] = (along[0][c] * xx1 - along[1][c] * xy) * inverse;
      slope[1][c] = (along[1][c] * xx0 - along[0][c] * xy) * inverse;
    }
    total = Floats{};
    for (long k = 0; k < kNeighbours; ++k) {
      const Floats x = load(around.points[0][k]) - means[0], y = load(around.points[1][k]) - means[1];
      square[k] = Floats{};
      for (long c = 0; c < 2; ++c) {
        const Floats rest = load(around.points[2 + c][k]) - means[2 + c] - slope[0][c] * x - slope[1][c] * y;
        square[k] += rest * rest;
      }
      const Floats loss = 1.0f + square[k] * (1.0f / (scale * scale));
      weight[k] = load(around.base[k]) / (loss * loss);
      total += weight[k];
    }
    position_x = means[2] - slope[0][0] * means[0] - slope[1][0] * means[1];
    position_y = means[3] - slope[0][1] * means[0] - slope[1][1] * means[1];
  }
  Floats squares = {};
  for (long k = 0; k < kNeighbours; ++k) squares += weight[k] * square[k];
  squares /= total + kTiny;
  for (long lane = 0; lane < kLanes; ++lane) {
    position[0][lane] = position_x[lane], position[1][lane] = position_y[lane];
    support[lane] = total[lane], spread[lane] = std::sqrt(squares[lane]);
  }
}

}  // namespace

// Positions and the targets of their matches (points, 2), `confidence` 0 for points without one → what the maps
// predict (points, 2), the support and the spread of every one (points).
extern "C" void matcher_fit(const float* positions, const float* targets, const float* confidence, long points,
                            float* predicted, float* support, float* spread, int threads) {
  std::vector<int32_t> chosen;
  for (long i = 0; i < points; ++i)
    if (confidence[i] > 0.0f) chosen.push_back((int32_t)i);
  if (chosen.empty()) {
    std::fill_n(predicted, 2 * points, 0.0f);
    std::fill_n(support, points, 0.0f);
    std::fill_n(spread, points, 0.0f);
    return;
  }
  const Grid grid(positions, chosen);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long first = 0; first < points; first += kLanes) {
    const long count = std::min(kLanes, points - first);
    Neighbourhood around = {};
    for (long lane = 0; lane < count; ++lane) {
      const long i = first + lane;
      float squares[kNeighbours];
      int32_t found[kNeighbours];
      const long held = grid.nearest(i, squares, found);
      const float reach = std::max(held ? std::sqrt(squares[held - 1]) : 0.0f, 0.02f) / 1.5f;
      for (long k = 0; k < held; ++k) {
        const float *at = positions + 2 * found[k], *target = targets + 2 * found[k];
        around.points[0][k][lane] = (at[0] - positions[2 * i]) / reach;
        around.points[1][k][lane] = (at[1] - positions[2 * i + 1]) / reach;
        around.points[2][k][lane] = target[0], around.points[3][k][lane] = target[1];
        around.base[k][lane] = bounded_exponential(squares[k] / (-2 * reach * reach)) * confidence[found[k]];
      }
    }
    Lanes position[2], total, residual;
    fit(around, position, total, residual);
    for (long lane = 0; lane < count; ++lane) {
      predicted[2 * (first + lane)] = position[0][lane], predicted[2 * (first + lane) + 1] = position[1][lane];
      support[first + lane] = total[lane], spread[first + lane] = residual[lane];
    }
  }
}
