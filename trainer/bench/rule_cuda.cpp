// The rule on the GPU: forward and backward each captured once and replayed.
#include <cmath>
#include <cstring>

#include <cuda_runtime_api.h>

#include "kernels/common/check.h"
#include "kernels/gdn/chunk_backward.h"
#include "kernels/gdn/chunk_forward.h"
#include "kernels/gdn/chunk_table.h"
#include "kernels/gdn/gates.h"
#include "reference/random.h"
#include "trainer/bench/graph_time.h"
#include "trainer/bench/rule.h"

namespace gdn::trainer::bench {

namespace {

using kernels::Bf16;

template <class T> class Array {
public:
  Array() = default;
  explicit Array(std::int64_t count) : count_(count) {
    void* data = nullptr;
    GDN_CUDA(cudaMalloc(&data, static_cast<size_t>(count) * sizeof(T)));
    data_ = static_cast<T*>(data);
    GDN_CUDA(cudaMemset(data_, 0, static_cast<size_t>(count) * sizeof(T)));
  }
  explicit Array(const std::vector<T>& host) : Array(static_cast<std::int64_t>(host.size())) { upload(host.data(), 0, count_); }
  Array(Array&& o) noexcept : data_(std::exchange(o.data_, nullptr)), count_(o.count_) {}
  Array& operator=(Array&& o) noexcept {
    std::swap(data_, o.data_);
    std::swap(count_, o.count_);
    return *this;
  }
  ~Array() { GDN_CUDA_NOTHROW(cudaFree(data_)); }
  T* get() const { return data_; }
  std::int64_t size() const { return count_; }
  void upload(const T* host, std::int64_t first, std::int64_t count) {
    GDN_CUDA(cudaMemcpy(data_ + first, host, static_cast<size_t>(count) * sizeof(T), cudaMemcpyHostToDevice));
  }

private:
  T* data_ = nullptr;
  std::int64_t count_ = 0;
};

Bf16 to_bf16(double value) {
  const auto single = static_cast<float>(value);
  std::uint32_t bits = 0;
  std::memcpy(&bits, &single, 4);
  return {static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// Normal random rows: a pool of 2^20 values, each repeat of it shifted by an odd number.
Array<Bf16> normal_rows(std::int64_t count, std::uint64_t seed) {
  const reference::RandomStream random{.seed = seed};
  std::vector<Bf16> pool(static_cast<size_t>(std::min<std::int64_t>(count, 1 << 20)));
  for (size_t i = 0; i < pool.size(); ++i) pool[i] = to_bf16(random.normal(i));
  Array<Bf16> out(count);
  const auto length = static_cast<std::int64_t>(pool.size());
  for (std::int64_t at = 0, shift = 0; at < count; shift = (shift + 12345) % (length / 2 + 1)) {
    const std::int64_t piece = std::min(length - shift, count - at);
    out.upload(pool.data() + shift, at, piece);
    at += piece;
  }
  return out;
}

// Inputs and outputs of one shape, and its two halves.
class Call {
public:
  explicit Call(const RuleCase& c)
      : n_(c.tokens()), heads_(c.value_heads), shape_{n_, static_cast<std::int64_t>(c.lengths.size()), c.key_heads, c.value_heads, kRuleDim, kRuleDim},
        q_(normal_rows(n_ * c.key_heads * kRuleDim, 1)), k_(normal_rows(n_ * c.key_heads * kRuleDim, 2)), v_(normal_rows(n_ * heads_ * kRuleDim, 3)),
        d_o_(normal_rows(n_ * heads_ * kRuleDim, 4)), alpha_(normal_rows(n_ * heads_, 5)), logits_(normal_rows(n_ * heads_, 6)), o_(v_.size()), dv_(v_.size()),
        dq_(q_.size()), dk_(k_.size()), n_saved_(n_ * heads_ * kernels::kChunk), d_alpha_(n_ * heads_), d_logits_(n_ * heads_), g_(n_ * heads_), beta_(n_ * heads_),
        g_cum_(n_ * heads_), dg_(n_ * heads_), dbeta_(n_ * heads_), parameters_(std::vector<float>(static_cast<size_t>(4 * heads_), 0.0f)),
        scratch_(std::max({kernels::gdn_chunk_forward_scratch(shape_), kernels::gdn_chunk_backward_scratch(shape_), kernels::decay_backward_scratch(n_, heads_)})),
        table_(kernels::gdn_chunk_table_bytes(n_, shape_.sequences)) {
    std::vector<std::int32_t> bounds{0};
    for (std::int64_t l : c.lengths) bounds.push_back(bounds.back() + static_cast<std::int32_t>(l));
    const Array<std::int32_t> device_bounds(bounds);
    context_.scratch = scratch_.get();
    context_.scratch_bytes = scratch_.size();
    GDN_CUDA(cudaDeviceGetAttribute(&context_.sm_count, cudaDevAttrMultiProcessorCount, 0));
    const auto table = kernels::gdn_chunk_table_at(table_.get(), n_, shape_.sequences);
    kernels::gdn_chunk_table({device_bounds.get(), false, n_, shape_.sequences, table}, context_);
    GDN_CUDA(cudaDeviceSynchronize());
    auto rows = [](const Array<Bf16>& x, int heads) { return kernels::GdnTokens{x.get(), std::int64_t{heads} * kRuleDim, kRuleDim}; };
    auto common = [&](auto& p) {
      p.shape = shape_;
      p.table = table;
      p.q = rows(q_, c.key_heads);
      p.k = rows(k_, c.key_heads);
      p.v = rows(v_, c.value_heads);
      p.beta = beta_.get();
      p.scale = 1 / std::sqrt(static_cast<float>(kRuleDim));
      p.l2_norm = true;
      p.g_cum = g_cum_.get();
      p.n = n_saved_.get();
    };
    common(forward_);
    common(backward_);
    forward_.g = g_.get();
    forward_.o = o_.get();
    backward_.d_o = rows(d_o_, c.value_heads);
    backward_.dq = dq_.get();
    backward_.dk = dk_.get();
    backward_.dv = dv_.get();
    backward_.dg = dg_.get();
    backward_.dbeta = dbeta_.get();
  }
  void forward(CUstream_st* stream) {
    context_.stream = stream;
    kernels::decay_forward(row(alpha_), parameter(0), parameter(1), 1, row(g_), context_);
    kernels::sigmoid_forward(row(logits_), 1, row(beta_), context_);
    kernels::gdn_chunk_forward(forward_, context_);
  }
  void backward(CUstream_st* stream) {
    context_.stream = stream;
    kernels::gdn_chunk_backward(backward_, context_);
    kernels::decay_backward({row(alpha_), parameter(0), parameter(1), 1, row(dg_), {row(d_alpha_), false}, parameters_.get() + 2 * heads_, parameters_.get() + 3 * heads_},
                            context_);
    kernels::sigmoid_backward(row(logits_), 1, row(dbeta_), {row(d_logits_), false}, context_);
  }

private:
  template <class T> kernels::Matrix row(const Array<T>& x) const {
    return {x.get(), std::is_same_v<T, float> ? DType::FP32 : DType::BF16, n_, heads_, heads_};
  }
  kernels::Matrix parameter(std::int64_t i) const { return {parameters_.get() + i * heads_, DType::FP32, 1, heads_, heads_}; }

  std::int64_t n_, heads_;
  kernels::GdnShape shape_;
  Array<Bf16> q_, k_, v_, d_o_, alpha_, logits_, o_, dv_, dq_, dk_, n_saved_, d_alpha_, d_logits_;
  Array<float> g_, beta_, g_cum_, dg_, dbeta_;
  Array<float> parameters_; // A_log, dt_bias and their gradients, each [heads]
  Array<char> scratch_, table_;
  kernels::LaunchContext context_;
  kernels::GdnChunkForwardParams forward_;
  kernels::GdnChunkBackwardParams backward_;
};

} // namespace

std::vector<RuleTime> time_rule_on_cuda(const std::vector<RuleCase>& cases, int replays, const RuleProgress& done) {
  constexpr BytesPerSecond kCopy = 4.2e12; // device-to-device copy of an H200, bytes read and written
  std::vector<RuleTime> out;
  for (const RuleCase& c : cases) {
    Call call(c);
    RuleTime t{.shape = c};
    t.forward = graph_time([&](CUstream_st* stream) { call.forward(stream); }, replays);
    t.backward = graph_time([&](CUstream_st* stream) { call.backward(stream); }, replays);
    t.forward_floor = rule_floor(c, false, kCopy);
    t.backward_floor = rule_floor(c, true, kCopy);
    out.push_back(t);
    done(t);
  }
  return out;
}

} // namespace gdn::trainer::bench
