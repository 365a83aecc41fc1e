// Times of the gated delta rule under CUDA-graph replay, as a table and as JSON (last line).
//   gdn_rule_bench [replays] [row]      all rows, or one (0..); one row with 0 replays runs it once
#include <cstdio>
#include <cstdlib>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "kernels/gdn/chunk_backward.h"
#include "kernels/gdn/chunk_forward.h"
#include "kernels/gdn/chunk_table.h"
#include "tests/gpu/device.h"

using namespace gdn;
using namespace gdn::gpu_test;

namespace {

constexpr int kDim = 128;

struct Shape {
  const char* name;
  int key_heads, value_heads;
  std::vector<int> lengths;
};

// A device tensor of random numbers: one pool of 2^22 values, repeated with an odd shift per
// repeat.
template <class T>
DeviceArray<T> random_tensor(std::size_t count, std::uint64_t seed, double (*draw)(Random&)) {
  Random random{seed};
  std::vector<T> pool(std::min<std::size_t>(count, std::size_t{1} << 22));
  for (auto& x : pool) {
    const auto y = static_cast<float>(draw(random));
    if constexpr (std::is_same_v<T, Bf16>)
      x = to_bf16(y);
    else
      x = y;
  }
  DeviceArray<T> out(count), device_pool(pool);
  for (std::size_t at = 0, shift = 0; at < count; shift = (shift + 12345) % (pool.size() / 2 + 1)) {
    const std::size_t piece = std::min(pool.size() - shift, count - at);
    GDN_CUDA(cudaMemcpy(out.get() + at, device_pool.get() + shift, piece * sizeof(T),
                        cudaMemcpyDeviceToDevice));
    at += piece;
  }
  return out;
}

// Inputs and outputs of one call: unit-variance rows, g = -3u^2, beta = U(0,1), L2 norm in the
// kernel.
class Call {
public:
  explicit Call(const Shape& s) {
    std::vector<std::int32_t> bounds{0};
    for (int l : s.lengths) bounds.push_back(bounds.back() + l);
    const std::size_t n = bounds.back(), hk = s.key_heads, hv = s.value_heads;
    shape_ = {bounds.back(), static_cast<std::int64_t>(s.lengths.size()),
              s.key_heads,   s.value_heads,
              kDim,          kDim};
    const auto normal = [](Random& r) { return r.normal(); };
    q_ = random_tensor<Bf16>(n * hk * kDim, 1, normal);
    k_ = random_tensor<Bf16>(n * hk * kDim, 2, normal);
    v_ = random_tensor<Bf16>(n * hv * kDim, 3, normal);
    d_o_ = random_tensor<Bf16>(n * hv * kDim, 4, normal);
    g_ = random_tensor<float>(n * hv, 5, [](Random& r) { return -3 * std::pow(r.uniform(), 2); });
    beta_ = random_tensor<float>(n * hv, 6, [](Random& r) { return r.uniform(); });
    for (auto* x : {&o_, &dv_}) *x = DeviceArray<Bf16>(n * hv * kDim);
    for (auto* x : {&dq_, &dk_}) *x = DeviceArray<Bf16>(n * hk * kDim);
    for (auto* x : {&dg_, &dbeta_, &g_cum_}) *x = DeviceArray<float>(n * hv);
    n_ = DeviceArray<Bf16>(n * hv * 64);
    scratch_ = DeviceArray<char>(std::max(kernels::gdn_chunk_forward_scratch(shape_),
                                          kernels::gdn_chunk_backward_scratch(shape_)));
    bounds_ = DeviceArray<std::int32_t>(bounds);
    table_memory_ = DeviceArray<char>(kernels::gdn_chunk_table_bytes(n, shape_.sequences));
    context_.scratch = scratch_.get();
    context_.scratch_bytes = static_cast<std::int64_t>(scratch_.size());
    GDN_CUDA(cudaDeviceGetAttribute(&context_.sm_count, cudaDevAttrMultiProcessorCount, 0));
    const auto table =
        kernels::gdn_chunk_table_at(table_memory_.get(), shape_.tokens, shape_.sequences);
    kernels::gdn_chunk_table({bounds_.get(), false, shape_.tokens, shape_.sequences, table},
                             context_);
    auto common = [&](auto& p) {
      p.shape = shape_;
      p.table = table;
      p.q = {q_.get(), s.key_heads * kDim, kDim};
      p.k = {k_.get(), s.key_heads * kDim, kDim};
      p.v = {v_.get(), s.value_heads * kDim, kDim};
      p.beta = beta_.get();
      p.scale = 0.08838835f;
      p.l2_norm = true;
    };
    common(forward_);
    common(backward_);
    forward_.g = g_.get();
    forward_.g_cum = g_cum_.get();
    backward_.g_cum = g_cum_.get();
    forward_.o = o_.get();
    forward_.n = n_.get();
    backward_.n = n_.get();
    backward_.d_o = {d_o_.get(), s.value_heads * kDim, kDim};
    backward_.dq = dq_.get();
    backward_.dk = dk_.get();
    backward_.dv = dv_.get();
    backward_.dg = dg_.get();
    backward_.dbeta = dbeta_.get();
  }
  void forward(cudaStream_t stream) {
    context_.stream = stream;
    kernels::gdn_chunk_forward(forward_, context_);
  }
  void backward(cudaStream_t stream) {
    context_.stream = stream;
    kernels::gdn_chunk_backward(backward_, context_);
  }
  double millions() const {
    return static_cast<double>(shape_.tokens) * shape_.value_heads / (1 << 20);
  }

private:
  kernels::GdnShape shape_;
  kernels::LaunchContext context_;
  kernels::GdnChunkForwardParams forward_;
  kernels::GdnChunkBackwardParams backward_;
  DeviceArray<Bf16> q_, k_, v_, d_o_, o_, dq_, dk_, dv_, n_;
  DeviceArray<float> g_, g_cum_, beta_, dg_, dbeta_;
  DeviceArray<char> scratch_, table_memory_;
  DeviceArray<std::int32_t> bounds_;
};

std::vector<int> ragged(int total, int count) { // document lengths, log-normal, summing to total
  Random random{11};
  std::vector<double> weight(count);
  double sum = 0;
  for (auto& w : weight) sum += w = std::exp(random.normal());
  std::vector<int> lengths(count);
  int used = 0;
  for (int i = 0; i < count; ++i) used += lengths[i] = static_cast<int>(total * weight[i] / sum);
  lengths[0] += total - used;
  return lengths;
}

} // namespace

int main(int argc, char** argv) try {
  if (!have_device()) return kSkip;
  const int replays = argc > 1 ? std::atoi(argv[1]) : 50;
  const int only = argc > 2 ? std::atoi(argv[2]) : -1;
  const std::vector<Shape> shapes = {
      {"1x32768", 16, 64, {32768}},
      {"4x8192", 16, 64, {8192, 8192, 8192, 8192}},
      {"1x32768", 16, 32, {32768}},
      {"4x8192", 16, 32, {8192, 8192, 8192, 8192}},
      {"32 documents", 16, 32, ragged(32768, 32)},
      {"1000 documents", 16, 32, ragged(32768, 1000)},
      {"1x8192", 16, 32, {8192}},
      {"1x32768", 2, 4, {32768}},
      {"1x32768", 16, 16, {32768}},
  };
  if (only >= 0 && replays == 0) { // once, for a profiler
    Call call(shapes.at(only));
    call.forward(nullptr);
    call.backward(nullptr);
    GDN_CUDA(cudaDeviceSynchronize());
    return 0;
  }
  cudaDeviceProp device;
  GDN_CUDA(cudaGetDeviceProperties(&device, 0));
  nlohmann::ordered_json out{
      {"schema", "gdn.bench/1"}, {"device", device.name}, {"replays", replays}};
  std::printf("%s, CUDA-graph replay, median [p10 p90] ms; per M = per 2^20 token-heads\n",
              device.name);
  std::printf("%-8s %-15s %26s %26s %8s %8s\n", "heads", "tokens", "forward", "backward", "fwd/M",
              "bwd/M");
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    if (only >= 0 && static_cast<int>(i) != only) continue;
    const Shape& s = shapes[i];
    Call call(s);
    const Timing f = time_graph([&](cudaStream_t stream) { call.forward(stream); }, replays);
    const Timing b = time_graph([&](cudaStream_t stream) { call.backward(stream); }, replays);
    const double millions = call.millions();
    std::printf("%3d/%-4d %-15s %8.3f [%7.3f %7.3f] %8.3f [%7.3f %7.3f] %8.3f %8.3f\n", s.key_heads,
                s.value_heads, s.name, f.median, f.p10, f.p90, b.median, b.p10, b.p90,
                f.median / millions, b.median / millions);
    std::fflush(stdout);
    out["rows"].push_back({{"heads", {s.key_heads, s.value_heads}},
                           {"tokens", s.name},
                           {"forward_ms", f.median},
                           {"backward_ms", b.median},
                           {"forward_ms_per_m", f.median / millions},
                           {"backward_ms_per_m", b.median / millions}});
  }
  std::printf("%s\n", out.dump().c_str());
  return 0;
} catch (const Error& error) {
  std::printf("error: %s\n", error.what());
  return 1;
}
