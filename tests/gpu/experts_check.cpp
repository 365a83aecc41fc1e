// Products of experts against fp64 on the CPU, and the sort of slots against a plain one: any number of rows an expert,
// odd widths, rows that nobody owns, gradients that add; the same bits in every run and for any number of
// multiprocessors; nothing written elsewhere.
//   experts_check         checks
//   experts_check quick   small ones only (for the memory and race checkers)
//   experts_check bench   times under CUDA-graph replay, beside the floors
#include <cstdio>
#include <cstring>
#include <numeric>
#include <string>
#include <thread>

#include "core/error.h"
#include "kernels/gemm/grouped_gemm.h"
#include "kernels/moe/sort.h"
#include "tests/gpu/device.h"

using namespace gdn;
using namespace gdn::gpu_test;
using kernels::Gradient;
using kernels::Groups;
using kernels::LaunchContext;
using kernels::Matrix;

namespace {

int failures = 0;
void require(bool ok, const std::string& what) {
  if (ok) return;
  std::printf("FAIL %s\n", what.c_str());
  ++failures;
}

LaunchContext context(int multiprocessors = 132) { return {nullptr, multiprocessors, nullptr, 0}; }

template <class T>
DType type() { return std::is_same_v<T, float> ? DType::FP32 : std::is_same_v<T, Bf16> ? DType::BF16 : DType::Int32; }
template <class T>
Matrix matrix(const DeviceArray<T>& a, std::int64_t rows, std::int64_t cols, std::int64_t stride) {
  return {a.get(), type<T>(), rows, cols, stride};
}

void on_all_cores(std::int64_t count, const std::function<void(std::int64_t)>& f) {
  const unsigned threads = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::jthread> pool;
  for (unsigned t = 0; t < threads; ++t)
    pool.emplace_back([&, t] {
      for (std::int64_t i = t; i < count; i += threads) f(i);
    });
}

// ------------------------------------------------------------------------------- products ----

struct Shape {
  std::string name;
  std::vector<int> counts;
  int in, out;
};

constexpr int kBehind = 40, kPad = 8; // rows of nobody, elements between rows

struct Host {
  std::vector<Bf16> values;
  std::int64_t stride;
  double operator()(std::int64_t r, std::int64_t c) const { return value(values[static_cast<std::size_t>(r * stride + c)]); }
};

// Rows of nobody are NaN, and so is what lies between rows.
Host random_rows(Random& random, std::int64_t rows, std::int64_t behind, std::int64_t cols) {
  Host m{std::vector<Bf16>(static_cast<std::size_t>((rows + behind) * (cols + kPad)), Bf16{0xffff}), cols + kPad};
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < cols; ++c) m.values[static_cast<std::size_t>(r * m.stride + c)] = to_bf16(static_cast<float>(random.normal()));
  return m;
}

// An exact sum, and the sum of its terms' magnitudes, which bounds the error of fp32 accumulation.
struct Exact {
  double sum = 0, magnitude = 0;
  void add(double x) { sum += x, magnitude += std::abs(x); }
  bool admits(double got, double rounding) const {
    return std::abs(got - sum) <= rounding * std::abs(sum) + 1e-5 * magnitude + 1e-30;
  }
};

class Products {
public:
  explicit Products(const Shape& s) : s_(s), offsets_(s.counts.size() + 1) {
    std::inclusive_scan(s.counts.begin(), s.counts.end(), offsets_.begin() + 1);
    rows_ = offsets_.back();
    Random random{static_cast<std::uint64_t>(rows_ * 1000 + s.in)};
    const auto experts = static_cast<std::int64_t>(s.counts.size());
    x_ = random_rows(random, rows_, kBehind, s.in);
    dy_ = random_rows(random, rows_, kBehind, s.out);
    w_ = random_rows(random, experts * s.out, 0, s.in);
    dw_.resize(static_cast<std::size_t>(experts * s.out * s.in));
    for (float& v : dw_) v = static_cast<float>(random.normal());
    for (std::int64_t r = 0, e = 0; r < rows_; ++r) {
      while (offsets_[static_cast<std::size_t>(e + 1)] <= r) ++e;
      expert_.push_back(e);
    }
  }

  void check() {
    const DeviceArray<Bf16> x(x_.values), dy(dy_.values), w(w_.values);
    const DeviceArray<std::int32_t> offsets(offsets_);
    const auto experts = static_cast<std::int64_t>(s_.counts.size());
    const Groups groups{static_cast<int>(experts), offsets.get()};
    const Matrix mx = matrix(x, rows_ + kBehind, s_.in, x_.stride), mdy = matrix(dy, rows_ + kBehind, s_.out, dy_.stride),
                 mw = matrix(w, experts * s_.out, s_.in, w_.stride);

    for (const bool accumulate : {false, true}) {
      const std::string add = accumulate ? " added" : "";
      rows_result("forward" + add, s_.out, accumulate, dy_,
                  [&](const Gradient& to, int sms) { kernels::grouped_forward(groups, mx, mw, to, context(sms)); },
                  [&](std::int64_t r, std::int64_t c, Exact& exact) {
                    const std::int64_t row = expert_[static_cast<std::size_t>(r)] * s_.out + c;
                    for (int k = 0; k < s_.in; ++k) exact.add(x_(r, k) * w_(row, k));
                  });
      rows_result("dgrad" + add, s_.in, accumulate, x_,
                  [&](const Gradient& to, int sms) { kernels::grouped_dgrad(groups, mdy, mw, to, context(sms)); },
                  [&](std::int64_t r, std::int64_t c, Exact& exact) {
                    const std::int64_t row = expert_[static_cast<std::size_t>(r)] * s_.out;
                    for (int k = 0; k < s_.out; ++k) exact.add(dy_(r, k) * w_(row + k, c));
                  });
    }
    weights_result([&](const Matrix& to, int sms) { kernels::grouped_wgrad(groups, mdy, mx, to, context(sms)); });
  }

private:
  using Sum = std::function<void(std::int64_t, std::int64_t, Exact&)>;

  // Result rows, written or added to what `old` has there.
  void rows_result(const std::string& what, std::int64_t cols, bool accumulate, const Host& old,
                   const std::function<void(const Gradient&, int)>& run, const Sum& sum) {
    const std::string name = s_.name + " " + what;
    const std::int64_t stride = cols + kPad;
    DeviceArray<Bf16> y(static_cast<std::size_t>((rows_ + kBehind) * stride));
    std::vector<Bf16> first;
    for (const int sms : {132, 132, 7, 1}) {
      y.poison();
      if (accumulate) y.upload(old.values); // as wide as the result
      run({matrix(y, rows_ + kBehind, cols, stride), accumulate}, sms);
      GDN_CUDA(cudaDeviceSynchronize());
      const std::vector<Bf16> got = y.download();
      require(y.guard_intact(), name + ": writes behind the result");
      if (first.empty()) first = got;
      require(std::memcmp(first.data(), got.data(), got.size() * 2) == 0, name + ": other bits with " + std::to_string(sms) + " multiprocessors");
    }
    std::vector<std::string> wrong(static_cast<std::size_t>(rows_ + kBehind));
    on_all_cores(rows_ + kBehind, [&](std::int64_t r) {
      for (std::int64_t c = 0; c < stride; ++c) {
        const Bf16 got = first[static_cast<std::size_t>(r * stride + c)];
        bool ok;
        if (r >= rows_ || c >= cols) {
          ok = got.bits == 0xffff;
        } else {
          Exact exact;
          if (accumulate) exact.add(old(r, c));
          sum(r, c, exact);
          ok = exact.admits(value(got), 0x1p-8);
        }
        if (!ok && wrong[static_cast<std::size_t>(r)].empty()) wrong[static_cast<std::size_t>(r)] = "row " + std::to_string(r) + ", column " + std::to_string(c);
      }
    });
    for (const std::string& w : wrong)
      if (!w.empty()) return require(false, name + ": " + w);
  }

  void weights_result(const std::function<void(const Matrix&, int)>& run) {
    const std::string name = s_.name + " wgrad";
    DeviceArray<float> dw(dw_);
    std::vector<float> first;
    for (const int sms : {132, 132, 7, 1}) {
      dw.upload(dw_);
      run(matrix(dw, static_cast<std::int64_t>(s_.counts.size()) * s_.out, s_.in, s_.in), sms);
      GDN_CUDA(cudaDeviceSynchronize());
      const std::vector<float> got = dw.download();
      require(dw.guard_intact(), name + ": writes behind the result");
      if (first.empty()) first = got;
      require(std::memcmp(first.data(), got.data(), got.size() * 4) == 0, name + ": other bits with " + std::to_string(sms) + " multiprocessors");
    }
    const auto rows = static_cast<std::int64_t>(s_.counts.size()) * s_.out;
    std::vector<std::string> wrong(static_cast<std::size_t>(rows));
    on_all_cores(rows, [&](std::int64_t r) {
      const auto e = static_cast<std::size_t>(r / s_.out);
      std::vector<Exact> exact(static_cast<std::size_t>(s_.in));
      for (int k = offsets_[e]; k < offsets_[e + 1]; ++k) {
        const double d = dy_(k, r % s_.out);
        for (int c = 0; c < s_.in; ++c) exact[static_cast<std::size_t>(c)].add(d * x_(k, c));
      }
      for (int c = 0; c < s_.in; ++c) {
        const auto at = static_cast<std::size_t>(r * s_.in + c);
        exact[static_cast<std::size_t>(c)].add(dw_[at]);
        const bool ok = s_.counts[e] == 0 ? first[at] == dw_[at] : exact[static_cast<std::size_t>(c)].admits(first[at], 0x1p-23);
        if (!ok && wrong[static_cast<std::size_t>(r)].empty()) wrong[static_cast<std::size_t>(r)] = "row " + std::to_string(r) + ", column " + std::to_string(c);
      }
    });
    for (const std::string& w : wrong)
      if (!w.empty()) return require(false, name + ": " + w);
  }

  Shape s_;
  std::vector<std::int32_t> offsets_;
  std::int64_t rows_;
  Host x_, dy_, w_;
  std::vector<float> dw_;
  std::vector<std::int64_t> expert_; // of each row
};

void check_products(bool quick) {
  std::vector<int> many(1024);
  for (int e = 0; e < 1024; ++e) many[static_cast<std::size_t>(e)] = e * 7 % 4;
  const std::vector<Shape> small = {
      {"few", {0, 1, 33, 130}, 136, 200},
      {"narrow", {5, 0, 70, 16, 300}, 8, 8},
      {"one expert", {300}, 72, 520},
      {"no rows", {0, 0, 0}, 64, 64},
  };
  const std::vector<Shape> large = {
      {"ragged", {0, 1, 7, 31, 32, 33, 63, 64, 65, 0, 127, 128, 129, 255, 256, 257, 287, 288, 289, 0}, 136, 200},
      {"tall", {1200, 0, 3, 1153}, 320, 264},
      {"1024 experts", many, 64, 72},
      {"deep", {40, 290}, 2048, 1024},
  };
  for (const std::vector<Shape>& shapes : {small, quick ? std::vector<Shape>{} : large})
    for (const Shape& s : shapes) {
      const int before = failures;
      Products(s).check();
      std::printf("products, %s: %s\n", s.name.c_str(), failures == before ? "ok" : "FAIL");
      std::fflush(stdout);
    }
}

// ----------------------------------------------------------------------------------- sort ----

void check_sort(const std::string& name, int tokens, int k, int experts, int capacity, int favourite) {
  const int before = failures;
  Random random{static_cast<std::uint64_t>(tokens * 31 + experts)};
  const int stride = k + 3; // elements between rows are nobody's
  std::vector<std::int32_t> chosen(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(stride), -1);
  for (int t = 0; t < tokens; ++t)
    for (int j = 0; j < k; ++j)
      chosen[static_cast<std::size_t>(t * stride + j)] = favourite >= 0 && random.uniform() < 0.9 ? favourite : static_cast<int>(random.next() % static_cast<std::uint64_t>(experts));

  std::vector<std::int32_t> counts(static_cast<std::size_t>(experts)), offsets(static_cast<std::size_t>(experts) + 1), map(chosen.size(), -1);
  for (int t = 0; t < tokens; ++t)
    for (int j = 0; j < k; ++j) ++counts[static_cast<std::size_t>(chosen[static_cast<std::size_t>(t * stride + j)])];
  for (std::size_t e = 0; e < counts.size(); ++e) offsets[e + 1] = offsets[e] + (capacity > 0 ? capacity : counts[e]);
  std::vector<std::int32_t> seen(counts.size());
  for (int t = 0; t < tokens; ++t)
    for (int j = 0; j < k; ++j) {
      const auto e = static_cast<std::size_t>(chosen[static_cast<std::size_t>(t * stride + j)]);
      const int place = seen[e]++;
      map[static_cast<std::size_t>(t * stride + j)] = capacity > 0 && place >= capacity ? -1 : offsets[e] + place;
    }

  const DeviceArray<std::int32_t> device_chosen(chosen);
  DeviceArray<std::int32_t> device_map(map.size()), device_counts(counts.size()), device_offsets(offsets.size()), only_counts(counts.size());
  const Matrix in = matrix(device_chosen, tokens, k, stride);
  for (int run = 0; run < 3; ++run) {
    device_map.poison(), device_counts.poison(), device_offsets.poison(), only_counts.poison();
    kernels::sort_slots({in, experts, capacity, matrix(device_map, tokens, k, stride), device_counts.get(), device_offsets.get()}, context());
    kernels::count_slots(in, experts, only_counts.get(), context());
    GDN_CUDA(cudaDeviceSynchronize());
    require(device_counts.download() == counts && only_counts.download() == counts, name + ": counts");
    require(device_offsets.download() == offsets, name + ": offsets");
    require(device_map.download() == map, name + ": rows");
    require(device_map.guard_intact() && device_counts.guard_intact() && device_offsets.guard_intact() && only_counts.guard_intact(), name + ": writes elsewhere");
  }
  std::printf("sort, %s: %s\n", name.c_str(), failures == before ? "ok" : "FAIL");
  std::fflush(stdout);
}

void check_sorts(bool quick) {
  check_sort("no slots", 0, 8, 16, 0, -1);
  check_sort("one slot", 1, 1, 1, 0, -1);
  check_sort("37 x 3", 37, 3, 5, 0, -1);
  check_sort("capacity above", 500, 2, 64, 1000, -1);
  check_sort("small capacity", 300, 2, 8, 50, 3);
  check_sort("3001 x 10 of 1024", 3001, 10, 1024, 0, -1);
  if (!quick) {
    check_sort("8192 x 8 of 256", 8192, 8, 256, 0, -1);
    check_sort("one favourite", 8192, 8, 256, 0, 77);
    check_sort("40000 x 10 of 512", 40000, 10, 512, 0, -1);
    check_sort("capacity", 4096, 8, 64, 500, 63);
  }
}

// ---------------------------------------------------------------------------------- bench ----

constexpr double kTensor = 790e12, kMemory = 4.2e12; // measured ceilings of an H200

// A pool of random numbers, over and over.
DeviceArray<Bf16> random_values(std::int64_t count, double scale) {
  Random random{static_cast<std::uint64_t>(count)};
  std::vector<Bf16> pool(static_cast<std::size_t>(std::min<std::int64_t>(count, (1 << 21) + 264)));
  for (Bf16& v : pool) v = to_bf16(static_cast<float>(scale * random.normal()));
  DeviceArray<Bf16> all(static_cast<std::size_t>(count));
  const DeviceArray<Bf16> device_pool(pool);
  for (std::size_t at = 0; at < all.size(); at += pool.size())
    GDN_CUDA(cudaMemcpy(all.get() + at, device_pool.get(), std::min(pool.size(), all.size() - at) * 2, cudaMemcpyDeviceToDevice));
  return all;
}

void print_time(const char* what, double flop, double bytes, const std::function<void(const LaunchContext&)>& run) {
  const Timing t = time_graph([&](cudaStream_t stream) { run({stream, 132, nullptr, 0}); }, 20);
  const double floor = 1e3 * std::max(flop / kTensor, bytes / kMemory);
  std::printf("  %-14s %8.3f ms (%.3f to %.3f) | floor %.3f | %.2f x | %4.0f TFLOP/s, %.2f TB/s\n", what, t.median, t.p10, t.p90, floor,
              t.median / floor, flop / t.median * 1e-9, bytes / t.median * 1e-9);
  std::fflush(stdout);
}

void bench_products(const char* name, int experts, std::int64_t rows, int hidden, int ffn) {
  Random random{static_cast<std::uint64_t>(experts)};
  std::vector<std::int32_t> offsets(static_cast<std::size_t>(experts) + 1);
  for (std::int64_t r = 0; r < rows; ++r) ++offsets[1 + random.next() % static_cast<std::uint64_t>(experts)];
  std::partial_sum(offsets.begin(), offsets.end(), offsets.begin());
  const DeviceArray<std::int32_t> device_offsets(offsets);
  const Groups groups{experts, device_offsets.get()};
  std::printf("%s: %d experts, %lld rows, hidden %d, ffn %d\n", name, experts, static_cast<long long>(rows), hidden, ffn);
  for (const auto& [fc, in, out] : {std::tuple{"fc1", hidden, 2 * ffn}, std::tuple{"fc2", ffn, hidden}}) {
    const std::int64_t weights = std::int64_t{experts} * in * out;
    const DeviceArray<Bf16> x = random_values(rows * in, 1), dy = random_values(rows * out, 1), w = random_values(weights, 0.02);
    DeviceArray<Bf16> y(static_cast<std::size_t>(rows * out)), dx(static_cast<std::size_t>(rows * in));
    DeviceArray<float> dw(static_cast<std::size_t>(weights));
    GDN_CUDA(cudaMemset(dw.get(), 0, static_cast<std::size_t>(weights) * 4));
    const double flop = 2.0 * static_cast<double>(rows) * in * out;
    const double operands = 2.0 * static_cast<double>(rows) * (in + out), all = static_cast<double>(weights);
    const std::string of = fc;
    print_time((of + " forward").c_str(), flop, operands + 2 * all, [&](const LaunchContext& c) {
      kernels::grouped_forward(groups, matrix(x, rows, in, in), matrix(w, std::int64_t{experts} * out, in, in), {matrix(y, rows, out, out), false}, c);
    });
    print_time((of + " dgrad").c_str(), flop, operands + 2 * all, [&](const LaunchContext& c) {
      kernels::grouped_dgrad(groups, matrix(dy, rows, out, out), matrix(w, std::int64_t{experts} * out, in, in), {matrix(dx, rows, in, in), false}, c);
    });
    print_time((of + " wgrad").c_str(), flop, operands + 8 * all, [&](const LaunchContext& c) {
      kernels::grouped_wgrad(groups, matrix(dy, rows, out, out), matrix(x, rows, in, in), matrix(dw, std::int64_t{experts} * out, in, in), c);
    });
  }
}

void bench_sort(int tokens, int k, int experts) {
  Random random{static_cast<std::uint64_t>(experts)};
  std::vector<std::int32_t> chosen(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(k));
  for (std::int32_t& e : chosen) e = static_cast<int>(random.next() % static_cast<std::uint64_t>(experts));
  const DeviceArray<std::int32_t> in(chosen);
  DeviceArray<std::int32_t> map(chosen.size()), counts(static_cast<std::size_t>(experts)), offsets(static_cast<std::size_t>(experts) + 1);
  std::printf("sort of %d x %d slots, %d experts\n", tokens, k, experts);
  print_time("sort", 0, 8.0 * static_cast<double>(chosen.size()), [&](const LaunchContext& c) {
    kernels::sort_slots({matrix(in, tokens, k, k), experts, 0, matrix(map, tokens, k, k), counts.get(), offsets.get()}, c);
  });
}

void bench() {
  bench_products("Qwen3.5-35B", 256, 65536, 2048, 512);
  bench_products("Qwen3-Next-80B", 512, 81920, 2048, 512);
  bench_products("Qwen3.5-397B on 8 ranks", 64, 81920, 4096, 1024);
  bench_products("few experts", 8, 65536, 2048, 512);
  bench_sort(8192, 8, 256);
  bench_sort(8192, 10, 512);
  bench_sort(32768, 8, 256);
}

} // namespace

int main(int argc, char** argv) {
  if (!have_device()) return kSkip;
  try {
    if (argc > 1 && std::string(argv[1]) == "bench") {
      bench();
    } else {
      const bool quick = argc > 1 && std::string(argv[1]) == "quick";
      check_products(quick);
      check_sorts(quick);
    }
  } catch (const Error& e) {
    std::printf("%s\n", e.what());
    return 1;
  }
  return failures == 0 ? 0 : 1;
}
