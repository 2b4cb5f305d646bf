// Runs the kernels on numbers from standard input and writes theirs to standard output, all float32.
// What the numbers are, and what is expected of them, is in test_compiled_emulated.py.
#include <cstdint>
#include <cstdio>
#include <vector>

extern "C" {
void matcher_attend_vectors(const void*, const void*, const void*, void*, const long*, int, long, long, long, long,
                            int);
void matcher_candidates(const float*, const float*, const float*, const float*, long, long, long, long, int32_t*,
                        float*, int32_t*, float*, float*, float*, uint16_t*, int);
void matcher_fit(const float*, const float*, const float*, long, float*, float*, float*, int);
void matcher_score_pixels(const void*, int, long, long, long, const float*, const float*, float*, int);
void matcher_normalise_gelu(void*, int, long, long, const float*, const float*, const float*, float, int);
void matcher_absorb(const float*, long, long, long, const float*, const float*, float, float*, int);
}

namespace {

using Numbers = std::vector<float>;

Numbers read(long count) {
    Numbers numbers(count);
    if (std::fread(numbers.data(), sizeof(float), count, stdin) != static_cast<size_t>(count)) throw 1;
    return numbers;
}

void write(const Numbers& numbers) { std::fwrite(numbers.data(), sizeof(float), numbers.size(), stdout); }

void attend(long n, long m, long width) {
    Numbers q = read(n * width), k = read(m * width), v = read(m * width), out(n * width);
    long strides[6] = {width, width, width, width, width, width};
    matcher_attend_vectors(q.data(), k.data(), v.data(), out.data(), strides, 0, n, m, 1, width, 1);
    write(out);
}

void candidates(long n, long m, long width, long best) {
    Numbers x = read(n * width), y = read(m * width), bin0 = read(n), bin1 = read(m);
    Numbers rows(n * best), columns(m * best), row_sums(n), column_sums(m);
    std::vector<int32_t> row_places(n * best), column_places(m * best);
    std::vector<uint16_t> weights(n * m);
    matcher_candidates(x.data(), y.data(), bin0.data(), bin1.data(), n, m, width, best, row_places.data(), rows.data(),
                       column_places.data(), columns.data(), row_sums.data(), column_sums.data(), weights.data(), 1);
    write(rows);
    write(columns);
    write(row_sums);
    write(column_sums);
}

void fit(long n) {
    Numbers points = read(2 * n), targets = read(2 * n), confidence = read(n);
    Numbers predicted(2 * n), support(n), spread(n);
    matcher_fit(points.data(), targets.data(), confidence.data(), n, predicted.data(), support.data(), spread.data(),
                1);
    write(predicted);
    write(support);
    write(spread);
}

void score_pixels(long height, long width, long channels) {
    Numbers map = read(height * width * channels), weights = read(4 * 9 * channels), bias = read(4);
    Numbers logits(4 * height * width);
    matcher_score_pixels(map.data(), 0, height, width, channels, weights.data(), bias.data(), logits.data(), 1);
    write(logits);
}

void normalise_gelu(long rows, long width) {
    Numbers x = read(rows * width), bias = read(width), gain = read(width), shift = read(width);
    matcher_normalise_gelu(x.data(), 0, rows, width, bias.data(), gain.data(), shift.data(), 1e-5f, 1);
    write(x);
}

void absorb(long n, long m) {
    Numbers scores = read(n * m), u = read(n), v = read(m), out(n * m);
    matcher_absorb(scores.data(), n, m, m, u.data(), v.data(), -80.0f, out.data(), 1);
    write(out);
}

}  // namespace

int main() {
    attend(100, 150, 64);
    candidates(100, 150, 64, 8);
    fit(100);
    score_pixels(10, 14, 16);
    normalise_gelu(33, 128);
    absorb(20, 31);
}
