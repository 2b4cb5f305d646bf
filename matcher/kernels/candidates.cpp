// Candidates: of every row and column of a product the largest entries. The product itself is only there a few rows
// at a time, in the cache.
#include <algorithm>
#include <vector>

#include "numbers.h"
#include "products.h"

namespace {

constexpr long kBlockRows = 96;  // a multiple of every tile's rows
constexpr long kStep = 16;       // columns that are compared together
constexpr long kChunk = 16 * kStep;
constexpr float kLargest = 8.0f;  // beyond which entries are not told apart in the sums of what is left out

// What an entry adds to those sums. Bounded: candidates are taken out again, which must leave digits for the rest.
inline float weight(float entry) { return bounded_exponential(entry < kLargest ? entry : kLargest); }

// Numbers as integers in the same order.
inline int32_t key_of(float value) {
  int32_t bits;
  memcpy(&bits, &value, 4);
  return bits ^ (bits >> 31 & INT32_MAX);
}

inline float value_of(int32_t key) {
  const int32_t bits = key ^ (key >> 31 & INT32_MAX);
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline long count_from(const int32_t* keys, long held, int32_t least) {
  int32_t count = 0;
#pragma omp simd reduction(+ : count)
  for (long k = 0; k < held; ++k) count += keys[k] >= least;
  return count;
}

// A key that at least `most` of `held` reach, and no more of them where that is possible.
int32_t bound(const int32_t* keys, long held, long most) {
  int64_t low = INT32_MAX, high = INT32_MIN;
  for (long k = 0; k < held; ++k) low = std::min<int64_t>(low, keys[k]), high = std::max<int64_t>(high, keys[k]);
  while (low < high) {
    const int64_t middle = high - (high - low) / 2;
    const long count = count_from(keys, held, (int32_t)middle);
    if (count == most) return (int32_t)middle;
    if (count > most) low = middle;
    else high = middle - 1;
  }
  return (int32_t)low;
}

// The entries of a row or column that may be among its largest, in the order of the others that they belong to.
struct Entries {
  int32_t *keys, *others;

  // Only the largest `most` stay, of equal ones the first; returns a key that the smallest of them reaches.
  int32_t largest(long held, long most) const {
    const int32_t least = bound(keys, held, most);
    long ties = most - (least < INT32_MAX ? count_from(keys, held, least + 1) : 0), to = 0;
    for (long k = 0; k < held; ++k) {
      const int32_t key = keys[k], other = others[k];
      const bool stays = key > least || (key == least && ties-- > 0);
      keys[to] = key, others[to] = other;
      to += stays;
    }
    return least;
  }

  // One more: there is room for twice as many as are wanted, of which the smaller half is dropped when it is full.
  // `least` is what the next one must exceed.
  void keep(int32_t& held, float& least, long most, float value, long other) const {
    keys[held] = key_of(value), others[held] = (int32_t)other;
    if (++held < 2 * most) return;
    least = value_of(largest(held, most));
    held = (int32_t)most;
  }

  void finish(int32_t& held, long most) const {
    if (held <= most) return;
    largest(held, most);
    held = (int32_t)most;
  }

  void write(long held, long most, int32_t* to, float* values) const {
    for (long k = 0; k < most; ++k) {
      to[k] = k < held ? others[k] : -1;
      values[k] = k < held ? value_of(keys[k]) : 0.0f;
    }
  }
};

struct Room {
  std::vector<int32_t> keys, others;

  explicit Room(long count) : keys(count), others(count) {}
  Entries from(long first) { return {keys.data() + first, others.data() + first}; }
};

// What is kept of every column, by one thread.
struct Columns {
  Room room;
  std::vector<int32_t> held;
  std::vector<float> least;

  Columns(long count, long most) : room(count * 2 * most), held(count, 0), least(count, -INFINITY) {}
};

// A row less the scores of its own dustbin and of the columns'. Returns the sum of its weights, which are added to
// those of the columns; `tops` are the largest numbers in the columns c, c + 16, c + 32, … of every chunk.
float compare(float* row, float bin, const float* bins, long columns, float* tops, float* column_sums, Half* weights) {
  float sums[kStep] = {};
  for (long j = 0; j < columns; j += kChunk, tops += kStep) {
    float top[kStep];
    std::fill_n(top, kStep, -INFINITY);
    for (long c = j; c < j + kChunk; c += kStep)
#pragma omp simd
      for (long lane = 0; lane < kStep; ++lane) {
        const float x = row[c + lane] - bin - bins[c + lane];
        row[c + lane] = x;
        top[lane] = x > top[lane] ? x : top[lane];
        const float added = weight(x);
        store(added, weights + c + lane);
        sums[lane] += added;
        column_sums[c + lane] += added;
      }
    std::copy_n(top, kStep, tops);
  }
  float sum = 0.0f;
  for (float x : sums) sum += x;
  return sum;
}

// The largest entries of a row, at most `most`; how many there are.
int32_t largest_of_row(const float* row, long columns, const std::vector<float>& tops, std::vector<int32_t>& keys,
                       long most, const Entries& entries) {
  float least = -INFINITY;
  if ((long)tops.size() > most) {
    // As many groups reach this as entries are wanted, so no smaller one is.
    keys.resize(tops.size());
    for (size_t g = 0; g < tops.size(); ++g) keys[g] = key_of(tops[g]);
    least = std::nextafter(value_of(bound(keys.data(), tops.size(), most)), -INFINITY);
  }
  int32_t held = 0;
  for (long j = 0; j < columns; j += kStep) {
    float least_here[kStep];
    std::fill_n(least_here, kStep, least);
    for (uint32_t bits = above(row + j, least_here); bits; bits &= bits - 1) {
      const long c = j + __builtin_ctz(bits);
      entries.keep(held, least, most, row[c], c);
    }
  }
  entries.finish(held, most);
  return held;
}

// Rows from `first` on, `count` of them with `stride` numbers each: what they add to the largest of every column.
void add_to_columns(const float* block, long first, long count, long stride, long most, Columns& kept) {
  for (long j = 0; j < stride; j += kStep)
    for (long r = 0; r < count; ++r)
      for (uint32_t bits = above(block + r * stride + j, kept.least.data() + j); bits; bits &= bits - 1) {
        const long c = j + __builtin_ctz(bits);
        kept.room.from(c * 2 * most).keep(kept.held[c], kept.least[c], most, block[r * stride + c], first + r);
      }
}

}  // namespace

// Of left (n, width) times right (m, width) transposed, less the scores bins0 (n) and bins1 (m) of the dustbins, the
// `most` largest entries of each row and of each column: their columns and values (n, most), their rows and values
// (m, most), −1 where there are fewer; and the sums of the exponentials of all entries of every row (n) and column (m),
// none counted as more than e^8. `weights` (n, m) are the exponentials themselves.
extern "C" void matcher_candidates(const float* left, const float* right, const float* bins0, const float* bins1,
                                   long n, long m, long width, long most, int32_t* columns, float* row_values,
                                   int32_t* rows, float* column_values, float* row_sums, float* column_sums,
                                   Half* weights, int threads) {
  Product product(right, m, width);
  const long padded = (m + kChunk - 1) / kChunk * kChunk, blocks = (n + kBlockRows - 1) / kBlockRows;
  std::vector<float> bins(padded, INFINITY);  // entries beyond the last column are −∞
  std::copy_n(bins1, m, bins.begin());
  std::vector<Columns> kept(threads, Columns(padded, most));
  std::vector<float> sums(blocks * padded, 0.0f);  // of the columns in every block, whoever computes it
#pragma omp parallel num_threads(threads)
  {
    Product::begin();
#pragma omp for schedule(static)
    for (long p = 0; p < product.panels(); ++p) product.pack(p);
#pragma omp for schedule(static, 1)
    for (int t = 0; t < threads; ++t) {
      std::vector<float> block(kBlockRows * padded), tops(padded / kChunk * kStep);
      std::vector<Half> row_weights(padded);
      std::vector<int32_t> keys;
      Room room(2 * most);
      const Entries entries = room.from(0);
      Product::Scratch scratch;
      for (long b = blocks * t / threads; b < blocks * (t + 1) / threads; ++b) {
        const long first = b * kBlockRows, count = std::min(kBlockRows, n - first);
        product.multiply(left + first * width, count, scratch, block.data(), padded);
        for (long r = 0; r < count; ++r) {
          const long i = first + r;
          float* row = block.data() + r * padded;
          row_sums[i] = compare(row, bins0[i], bins.data(), padded, tops.data(), sums.data() + b * padded,
                                row_weights.data());
          std::copy_n(row_weights.data(), m, weights + i * m);
          const int32_t held = largest_of_row(row, padded, tops, keys, most, entries);
          entries.write(held, most, columns + i * most, row_values + i * most);
        }
        add_to_columns(block.data(), first, count, padded, most, kept[t]);
      }
    }
    Product::end();
    Room room(2 * most * threads);
    const Entries entries = room.from(0);
#pragma omp for schedule(static)
    for (long j = 0; j < m; ++j) {
      int32_t held = 0;
      for (Columns& own : kept) {
        const Entries part = own.room.from(j * 2 * most);
        std::copy_n(part.keys, own.held[j], entries.keys + held);
        std::copy_n(part.others, own.held[j], entries.others + held);
        held += own.held[j];
      }
      entries.finish(held, most);
      entries.write(held, most, rows + j * most, column_values + j * most);
      column_sums[j] = 0.0f;
      for (long b = 0; b < blocks; ++b) column_sums[j] += sums[b * padded + j];
    }
  }
}

namespace {

struct Value {
  int32_t other;
  float value;
};

}  // namespace

// The candidates of rows and columns as one set, ordered by row and then by column, and its transpose.
// Arguments as `matcher_candidates` leaves them, the values of m columns and n rows in the order of the set;
// `starts` (n + 1) and `turned_starts` (m + 1) are where each row and column begins, `order` gives the place of every
// entry of the transpose in the set. `row_sums`, `column_sums` and `weights` (n, m) lose what the set holds and keep what
// is left out.
// Returns how many there are, at most (n + m) · most.
extern "C" long matcher_join(long n, long m, long most, const int32_t* columns, const float* row_values,
                             const int32_t* rows, const float* column_values, int32_t* starts, int32_t* others,
                             float* values, int32_t* turned_starts, int32_t* turned_others, int32_t* order,
                             float* row_sums, float* column_sums, Half* weights) {
  // By column, from the lists of the rows and then its own; taken column by column, the rows' lists end up in order.
  std::vector<long> begin(m + 1, 0);
  for (long e = 0; e < n * most; ++e)
    if (columns[e] >= 0) ++begin[columns[e] + 1];
  for (long j = 0; j < m; ++j) begin[j + 1] += begin[j];
  std::vector<Value> listed(begin[m]), joined;
  std::vector<long> next(begin.begin(), begin.end() - 1);
  for (long i = 0; i < n; ++i)
    for (long e = i * most; e < (i + 1) * most; ++e)
      if (columns[e] >= 0) listed[next[columns[e]]++] = {(int32_t)i, row_values[e]};
  std::vector<int32_t> seen(n, -1);
  joined.reserve((n + m) * most);
  std::fill_n(starts, n + 1, 0);
  turned_starts[0] = 0;
  for (long j = 0; j < m; ++j) {
    for (long e = begin[j]; e < begin[j + 1]; ++e) joined.push_back(listed[e]), seen[listed[e].other] = (int32_t)j;
    for (long e = j * most; e < (j + 1) * most; ++e)
      if (rows[e] >= 0 && seen[rows[e]] != j) joined.push_back({rows[e], column_values[e]});
    turned_starts[j + 1] = (int32_t)joined.size();
    for (size_t e = turned_starts[j]; e < joined.size(); ++e) {
      const float held = weight(joined[e].value);
      row_sums[joined[e].other] -= held, column_sums[j] -= held;
      weights[joined[e].other * m + j] = Half{0};
      ++starts[joined[e].other + 1];
    }
    column_sums[j] = std::max(column_sums[j], 0.0f);
  }
  for (long i = 0; i < n; ++i) row_sums[i] = std::max(row_sums[i], 0.0f), starts[i + 1] += starts[i];
  next.assign(starts, starts + n);
  for (long j = 0; j < m; ++j)
    for (long e = turned_starts[j]; e < turned_starts[j + 1]; ++e) {
      const long at = next[joined[e].other]++;
      others[at] = (int32_t)j, values[at] = joined[e].value;
    }
  next.assign(turned_starts, turned_starts + m);
  for (long i = 0; i < n; ++i)
    for (long e = starts[i]; e < starts[i + 1]; ++e) {
      const long at = next[others[e]]++;
      turned_others[at] = (int32_t)i, order[at] = (int32_t)e;
    }
  return (long)joined.size();
}
