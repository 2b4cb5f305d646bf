// Candidates: of every row and column of a product the largest entries. The product itself is only there a few rows
// at a time, in the cache.
#include <algorithm>
#include <vector>

#include "products.h"

namespace {

constexpr long kBlockRows = 96;  // a multiple of every tile's rows
constexpr long kStep = 16;       // columns that are compared together
constexpr long kChunk = 16 * kStep;
constexpr float kLargest = 8.0f;  // beyond which entries are not told apart in the sums of what is left out

// What an entry adds to those sums. Bounded: candidates are taken out again, which must leave digits for the rest.
inline float weight(float entry) { return bounded_exponential(entry < kLargest ? entry : kLargest); }

// A number and the row or column that it belongs to, in the order of the numbers; of equal ones the first is greater.
typedef uint64_t Entry;

inline Entry entry(float value, long other) {
  int32_t bits;
  memcpy(&bits, &value, 4);
  const uint32_t ordered = (uint32_t)bits ^ (uint32_t)(bits >> 31 | INT32_MIN);
  return (Entry)ordered << 32 | (uint32_t)~other;
}

inline int32_t other_of(Entry entry) { return (int32_t)~(uint32_t)entry; }

inline float value_of(Entry entry) {
  const int32_t ordered = (int32_t)(entry >> 32);
  const int32_t bits = ordered ^ (~(ordered >> 31) | INT32_MIN);
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// The largest `most` of `held` entries come first.
inline void largest_first(Entry* entries, long held, long most) {
  std::nth_element(entries, entries + most - 1, entries + held, std::greater<Entry>());
}

// One more entry of a row or column: there is room for twice as many as are wanted, of which the smaller half is
// dropped when it is full. `least` is what the next one must exceed.
inline void keep(Entry* entries, int32_t& held, float& least, long most, Entry added) {
  entries[held++] = added;
  if (held < 2 * most) return;
  largest_first(entries, held, most);
  held = (int32_t)most;
  least = value_of(entries[most - 1]);
}

inline void finish(Entry* entries, int32_t& held, long most) {
  if (held <= most) return;
  largest_first(entries, held, most);
  held = (int32_t)most;
}

// What is kept of every column, by one thread.
struct Columns {
  std::vector<Entry> entries;
  std::vector<int32_t> held;
  std::vector<float> least;

  Columns(long count, long most) : entries(count * 2 * most), held(count, 0), least(count, -INFINITY) {}
};

// A row less the scores of its own dustbin and of the columns'. Returns the sum of its weights, which are added to
// those of the columns; `tops` are the largest numbers in the columns c, c + 16, c + 32, … of every chunk.
float compare(float* row, float bin, const float* bins, long columns, float* tops, float* column_sums) {
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
int32_t largest_of_row(const float* row, const std::vector<float>& tops, std::vector<float>& sorted, long most,
                       Entry* entries) {
  float least = -INFINITY;
  if ((long)tops.size() > most) {
    // As many groups reach this as entries are wanted, so no smaller one is.
    sorted = tops;
    std::nth_element(sorted.begin(), sorted.begin() + most - 1, sorted.end(), std::greater<float>());
    least = std::nextafter(sorted[most - 1], -INFINITY);
  }
  int32_t held = 0;
  for (long g = 0; g < (long)tops.size(); ++g) {
    if (!(tops[g] > least)) continue;
    const long first = g / kStep * kChunk + g % kStep;
    for (long c = first; c < first + kChunk; c += kStep)
      if (row[c] > least) keep(entries, held, least, most, entry(row[c], c));
  }
  finish(entries, held, most);
  return held;
}

// Rows from `first` on, `count` of them with `stride` numbers each: what they add to the largest of every column.
void add_to_columns(const float* block, long first, long count, long stride, long most, Columns& kept) {
  for (long j = 0; j < stride; j += kStep)
    for (long r = 0; r < count; ++r)
      for (uint32_t bits = above(block + r * stride + j, kept.least.data() + j); bits; bits &= bits - 1) {
        const long c = j + __builtin_ctz(bits);
        keep(kept.entries.data() + c * 2 * most, kept.held[c], kept.least[c], most,
             entry(block[r * stride + c], first + r));
      }
}

void write(const Entry* entries, long held, long most, int32_t* others, float* values) {
  for (long k = 0; k < most; ++k) {
    others[k] = k < held ? other_of(entries[k]) : -1;
    values[k] = k < held ? value_of(entries[k]) : 0.0f;
  }
}

}  // namespace

// Of left (n, width) times right (m, width) transposed, less the scores bins0 (n) and bins1 (m) of the dustbins, the
// `most` largest entries of each row and of each column: their columns and values (n, most), their rows and values
// (m, most), −1 where there are fewer; and the sums of the exponentials of all entries of every row (n) and column (m),
// none counted as more than e^8.
extern "C" void matcher_candidates(const float* left, const float* right, const float* bins0, const float* bins1,
                                   long n, long m, long width, long most, int32_t* columns, float* row_values,
                                   int32_t* rows, float* column_values, float* row_sums, float* column_sums,
                                   int threads) {
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
      std::vector<float> block(kBlockRows * padded), tops(padded / kChunk * kStep), sorted;
      std::vector<Entry> entries(2 * most);
      Product::Scratch scratch;
      for (long b = blocks * t / threads; b < blocks * (t + 1) / threads; ++b) {
        const long first = b * kBlockRows, count = std::min(kBlockRows, n - first);
        product.multiply(left + first * width, count, scratch, block.data(), padded);
        for (long r = 0; r < count; ++r) {
          const long i = first + r;
          float* row = block.data() + r * padded;
          row_sums[i] = compare(row, bins0[i], bins.data(), padded, tops.data(), sums.data() + b * padded);
          const int32_t held = largest_of_row(row, tops, sorted, most, entries.data());
          write(entries.data(), held, most, columns + i * most, row_values + i * most);
        }
        add_to_columns(block.data(), first, count, padded, most, kept[t]);
      }
    }
    Product::end();
    std::vector<Entry> entries(2 * most * threads);
#pragma omp for schedule(static)
    for (long j = 0; j < m; ++j) {
      int32_t held = 0;
      for (const Columns& own : kept) {
        std::copy_n(own.entries.data() + j * 2 * most, own.held[j], entries.data() + held);
        held += own.held[j];
      }
      finish(entries.data(), held, most);
      write(entries.data(), held, most, rows + j * most, column_values + j * most);
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
// entry of the transpose in the set. `row_sums` and `column_sums` lose what the set holds and keep what is left out.
// Returns how many there are, at most (n + m) · most.
extern "C" long matcher_join(long n, long m, long most, const int32_t* columns, const float* row_values,
                             const int32_t* rows, const float* column_values, int32_t* starts, int32_t* others,
                             float* values, int32_t* turned_starts, int32_t* turned_others, int32_t* order,
                             float* row_sums, float* column_sums) {
  std::vector<int32_t> begin(n + 1, 0);
  for (long e = 0; e < m * most; ++e)
    if (rows[e] >= 0) ++begin[rows[e] + 1];
  for (long i = 0; i < n; ++i) begin[i + 1] += begin[i];
  std::vector<Value> by_row(begin[n]);
  std::vector<int32_t> next(begin.begin(), begin.end() - 1);
  for (long j = 0; j < m; ++j)
    for (long e = j * most; e < (j + 1) * most; ++e)
      if (rows[e] >= 0) by_row[next[rows[e]]++] = {(int32_t)j, column_values[e]};
  std::vector<int32_t> seen(m, -1);
  std::vector<Value> row;
  long count = 0;
  std::fill_n(turned_starts, m + 1, 0);
  for (long i = 0; i < n; ++i) {
    row.clear();
    for (long e = i * most; e < (i + 1) * most; ++e)
      if (columns[e] >= 0) row.push_back({columns[e], row_values[e]}), seen[columns[e]] = (int32_t)i;
    for (long e = begin[i]; e < begin[i + 1]; ++e)
      if (seen[by_row[e].other] != i) row.push_back(by_row[e]);
    std::sort(row.begin(), row.end(), [](const Value& a, const Value& b) { return a.other < b.other; });
    starts[i] = (int32_t)count;
    for (const Value& x : row) {
      others[count] = x.other, values[count] = x.value, ++count;
      ++turned_starts[x.other + 1];
      const float held = weight(x.value);
      row_sums[i] -= held, column_sums[x.other] -= held;
    }
    row_sums[i] = std::max(row_sums[i], 0.0f);
  }
  starts[n] = (int32_t)count;
  for (long j = 0; j < m; ++j) column_sums[j] = std::max(column_sums[j], 0.0f);
  for (long j = 0; j < m; ++j) turned_starts[j + 1] += turned_starts[j];
  next.assign(turned_starts, turned_starts + m);
  for (long i = 0; i < n; ++i)
    for (long e = starts[i]; e < starts[i + 1]; ++e) {
      const long at = next[others[e]]++;
      turned_others[at] = (int32_t)i, order[at] = (int32_t)e;
    }
  return count;
}
