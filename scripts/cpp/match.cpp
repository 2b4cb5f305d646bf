// Two pictures in, matches out, with our ONNX files and ONNX Runtime; neither Python nor torch.
//
//   matcher weights export hybrid-learned --onnx models
//   c++ -std=c++17 -O2 scripts/cpp/match.cpp -o match -I/usr/include/onnxruntime -lonnxruntime -ljpeg -lpng
//   ./match models/learned.onnx models/hybrid-learned.onnx A.jpg B.png [1024 keypoints] [1024 pixels]
//
// (Debian: libonnxruntime-dev, libjpeg-dev, libpng-dev.) Each line of the output is x0 y0 x1 y1 score: a match
// in pixels of the files, the centre of the first pixel being (0, 0), the most probable match first. These are
// about the matches of `matcher match --engine onnx --resize 1024 --no-upright --no-further-passes --no-refine`: all
// layers run on all keypoints, and scores are not calibrated.

#include <onnxruntime_cxx_api.h>

#include <jpeglib.h>
#include <png.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

struct Image {  // red, green and blue, row by row
    int width = 0, height = 0;
    std::vector<unsigned char> rgb;
};

struct Grey {  // from 0 to 1, row by row
    int width = 0, height = 0;
    std::vector<float> values;
};

struct Features {
    std::vector<float> keypoints, descriptors;  // (N, 2) in pixels of the file, and (N, D)
    std::array<float, 2> size;                  // width and height of the file
    int64_t count = 0, dimension = 0;
};

[[noreturn]] void fail_jpeg(j_common_ptr codec) {
    char text[JMSG_LENGTH_MAX];
    codec->err->format_message(codec, text);
    throw std::runtime_error(text);
}

Image read_jpeg(FILE* file) {
    Image image;
    jpeg_decompress_struct codec;
    jpeg_error_mgr errors;
    codec.err = jpeg_std_error(&errors);
    errors.error_exit = fail_jpeg;
    errors.output_message = [](j_common_ptr) {};
    jpeg_create_decompress(&codec);
    const std::unique_ptr<jpeg_decompress_struct, decltype(&jpeg_destroy_decompress)> owner(
        &codec, jpeg_destroy_decompress);
    jpeg_stdio_src(&codec, file);
    jpeg_read_header(&codec, TRUE);
    codec.out_color_space = JCS_RGB;
    jpeg_start_decompress(&codec);
    image.width = codec.output_width, image.height = codec.output_height;
    image.rgb.resize(size_t(3) * image.width * image.height);
    while (codec.output_scanline < codec.output_height) {
        unsigned char* row = &image.rgb[size_t(3) * image.width * codec.output_scanline];
        jpeg_read_scanlines(&codec, &row, 1);
    }
    jpeg_finish_decompress(&codec);
    if (errors.num_warnings) throw std::runtime_error("the file is cut short or damaged");
    return image;
}

Image read_png(FILE* file) {
    Image image;
    png_image codec{};
    codec.version = PNG_IMAGE_VERSION;
    if (!png_image_begin_read_from_stdio(&codec, file)) throw std::runtime_error(codec.message);
    codec.format = PNG_FORMAT_RGB;
    image.width = codec.width, image.height = codec.height;
    image.rgb.resize(PNG_IMAGE_SIZE(codec));
    if (!png_image_finish_read(&codec, nullptr, image.rgb.data(), 0, nullptr)) {
        throw std::runtime_error(codec.message);
    }
    return image;
}

Image read_image(const std::string& path) {
    const std::unique_ptr<FILE, decltype(&std::fclose)> file(std::fopen(path.c_str(), "rb"), std::fclose);
    if (!file) throw std::runtime_error(path + " cannot be opened");
    const int first = std::fgetc(file.get());
    std::rewind(file.get());
    try {
        if (first == 0xff) return read_jpeg(file.get());
        if (first == 0x89) return read_png(file.get());
    } catch (const std::runtime_error& error) {
        throw std::runtime_error(path + ": " + error.what());
    }
    throw std::runtime_error(path + " is neither a JPEG nor a PNG file");
}

// Means over areas of pixels along one axis: `in` is (outer, length, inner), what is returned (outer, wanted, inner).
std::vector<float> shrunk(const std::vector<float>& in, size_t outer, int length, size_t inner, int wanted) {
    std::vector<float> out(outer * wanted * inner, 0.f);
    const double step = double(length) / wanted;
    for (size_t o = 0; o < outer; ++o) {
        for (int i = 0; i < wanted; ++i) {
            const double start = i * step, end = std::min<double>(start + step, length);
            for (int j = int(start); j < end; ++j) {
                const float share = float((std::min(end, j + 1.0) - std::max<double>(start, j)) / step);
                for (size_t c = 0; c < inner; ++c) {
                    out[(o * wanted + i) * inner + c] += share * in[(o * length + j) * inner + c];
                }
            }
        }
    }
    return out;
}

// Made smaller if the longer side has more than `side` pixels.
Grey grey(const Image& image, int side) {
    const double factor = std::min(1.0, double(side) / std::max(image.width, image.height));
    Grey found;
    found.width = std::max(1, int(std::nearbyint(image.width * factor)));
    found.height = std::max(1, int(std::nearbyint(image.height * factor)));
    std::vector<float> rgb(image.rgb.begin(), image.rgb.end());
    if (factor < 1) {
        rgb = shrunk(rgb, image.height, image.width, 3, found.width);
        rgb = shrunk(rgb, 1, image.height, size_t(3) * found.width, found.height);
    }
    found.values.resize(size_t(found.width) * found.height);
    for (size_t i = 0; i < found.values.size(); ++i) {
        const float *c = &rgb[3 * i], weights[] = {.299f, .587f, .114f};
        float sum = 0;
        for (int k = 0; k < 3; ++k) sum += weights[k] * std::nearbyint(c[k]);
        found.values[i] = std::nearbyint(sum) / 255.f;
    }
    return found;
}

Ort::MemoryInfo memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);

template <typename T>
Ort::Value tensor(const T* values, size_t count, std::initializer_list<int64_t> shape) {
    return Ort::Value::CreateTensor<T>(memory, const_cast<T*>(values), count, shape.begin(), shape.size());
}

constexpr int STRIDE = 32;  // of the front end: pixels a side

Features extract(Ort::Session& session, const std::string& path, int64_t most, int side) {
    const Image image = read_image(path);
    Features features;
    features.size = {float(image.width), float(image.height)};
    const Grey small = grey(image, side);
    // Repeated at the right and lower edge to multiples of the stride; no points there.
    const int64_t width = (small.width + STRIDE - 1) / STRIDE * STRIDE;
    const int64_t height = (small.height + STRIDE - 1) / STRIDE * STRIDE;
    std::vector<float> pixels(width * height);
    const std::unique_ptr<bool[]> mask(new bool[pixels.size()]);
    for (int64_t y = 0; y < height; ++y) {
        for (int64_t x = 0; x < width; ++x) {
            const int64_t column = std::min<int64_t>(x, small.width - 1), row = std::min<int64_t>(y, small.height - 1);
            pixels[y * width + x] = small.values[row * small.width + column];
            mask[y * width + x] = x < small.width && y < small.height;
        }
    }
    const char *inputs[] = {"image", "mask", "max_keypoints"}, *outputs[] = {"keypoints", "descriptors"};
    Ort::Value given[] = {tensor(pixels.data(), pixels.size(), {1, 1, height, width}),
                          tensor(mask.get(), pixels.size(), {height, width}), tensor(&most, 1, {1})};
    auto found = session.Run(Ort::RunOptions(), inputs, given, 3, outputs, 2);
    const auto shape = found[1].GetTensorTypeAndShapeInfo().GetShape();
    features.count = shape[0], features.dimension = shape[1];
    const float *points = found[0].GetTensorData<float>(), *values = found[1].GetTensorData<float>();
    features.descriptors.assign(values, values + shape[0] * shape[1]);
    const double scale[] = {double(small.width) / image.width, double(small.height) / image.height};
    for (int64_t i = 0; i < 2 * shape[0]; ++i) {
        features.keypoints.push_back(float((points[i] + .5) / scale[i % 2] - .5));
    }
    return features;
}

struct Matches {
    std::vector<float> points0, points1, scores;  // (K, 2) in pixels of the files, and (K,)
};

Matches match(Ort::Session& session, const Features& first, const Features& second) {
    const char *inputs[] = {"keypoints0", "descriptors0", "size0", "matched_orientation0",
                            "keypoints1", "descriptors1", "size1", "matched_orientation1"};
    const char* outputs[] = {"matches", "scores"};
    const int64_t upright = 1;
    Matches matches;
    if (!first.count || !second.count) return matches;
    std::vector<Ort::Value> given;
    for (const Features* each : {&first, &second}) {
        const int64_t n = each->count;
        given.push_back(tensor(each->keypoints.data(), each->keypoints.size(), {1, n, 2}));
        given.push_back(tensor(each->descriptors.data(), each->descriptors.size(), {1, n, each->dimension}));
        given.push_back(tensor(each->size.data(), 2, {1, 2}));
        given.push_back(tensor(&upright, 1, {1}));
    }
    auto found = session.Run(Ort::RunOptions(), inputs, given.data(), given.size(), outputs, 2);
    const int64_t* pairs = found[0].GetTensorData<int64_t>();
    const float* scores = found[1].GetTensorData<float>();
    const int64_t rows = found[1].GetTensorTypeAndShapeInfo().GetElementCount();
    for (int64_t k = 0; k < rows && pairs[2 * k] >= 0; ++k) {
        for (int axis : {0, 1}) {
            matches.points0.push_back(first.keypoints[2 * pairs[2 * k] + axis]);
            matches.points1.push_back(second.keypoints[2 * pairs[2 * k + 1] + axis]);
        }
        matches.scores.push_back(scores[k]);
    }
    return matches;
}

int main(int count, char** arguments) try {
    if (count < 5) {
        std::fprintf(stderr, "usage: %s FRONT_END.onnx MATCHER.onnx A B [keypoints] [pixels]\n", *arguments);
        return 2;
    }
    const int64_t keypoints = count > 5 ? std::atoll(arguments[5]) : 1024;
    const int side = count > 6 ? std::atoi(arguments[6]) : 1024;
    if (keypoints < 1 || side < 1) throw std::runtime_error("keypoints and pixels must be at least 1");
    Ort::Env environment(ORT_LOGGING_LEVEL_ERROR, "match");
    Ort::SessionOptions options;
    options.AddConfigEntry("session.set_denormal_as_zero", "1");  // sharp softmaxes are full of such numbers
    Ort::Session front_end(environment, arguments[1], options), network(environment, arguments[2], options);
    const Features first = extract(front_end, arguments[3], keypoints, side);
    const Features second = extract(front_end, arguments[4], keypoints, side);
    const Matches matches = match(network, first, second);
    for (size_t k = 0; k < matches.scores.size(); ++k) {
        const float *p = &matches.points0[2 * k], *q = &matches.points1[2 * k];
        std::printf("%.3f %.3f %.3f %.3f %.4f\n", p[0], p[1], q[0], q[1], matches.scores[k]);
    }
    return 0;
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
