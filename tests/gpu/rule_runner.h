// Runs gdn_chunk_forward and gdn_chunk_backward on a RuleProblem: poisoned outputs and scratch,
// guard bands, optional strided layouts.
#pragma once
#include "kernels/gdn/chunk_backward.h"
#include "kernels/gdn/chunk_forward.h"
#include "kernels/gdn/chunk_table.h"
#include "tests/gpu/device.h"
#include "tests/gpu/rule_oracle.h"

namespace gdn::gpu_test {

enum class Placement {
  kPacked,    // [tokens, heads, width]
  kProjected, // q, k, v are slices of one [tokens, q | k | v] buffer
  kHeadMajor  // [heads, tokens, width]
};

template <class T>
std::vector<double> widen(const std::vector<T>& x) {
  std::vector<double> out(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) out[i] = value(x[i]);
  return out;
}
inline std::vector<float> narrow(const std::vector<double>& x) { return {x.begin(), x.end()}; }

class RuleRunner {
public:
  explicit RuleRunner(const RuleProblem& p, Placement placement = Placement::kPacked) : p_(p) {
    const std::size_t n = p.tokens(), hv = p.value_heads(), hk = p.key_heads;
    shape_ = {p.tokens(), p.sequences(), p.key_heads, p.value_heads(), p.key_dim, p.value_dim};
    int device = 0;
    GDN_CUDA(cudaDeviceGetAttribute(&context_.sm_count, cudaDevAttrMultiProcessorCount, device));
    place(placement);
    g_ = DeviceArray<float>(narrow(p.g));
    beta_ = DeviceArray<float>(narrow(p.beta));
    if (!p.initial.empty()) initial_ = DeviceArray<float>(narrow(p.initial));
    if (!p.d_final.empty()) d_final_ = DeviceArray<float>(narrow(p.d_final));
    std::vector<std::int32_t> bounds{0};
    for (int l : p.lengths) bounds.push_back(bounds.back() + l);
    bounds_ = DeviceArray<std::int32_t>(bounds);
    table_memory_ = DeviceArray<char>(kernels::gdn_chunk_table_bytes(n, p.sequences()));
    o_ = DeviceArray<Bf16>(n * hv * p.value_dim);
    n_ = DeviceArray<Bf16>(n * hv * 64);
    dq_ = DeviceArray<Bf16>(n * hk * p.key_dim);
    dk_ = DeviceArray<Bf16>(n * hk * p.key_dim);
    dv_ = DeviceArray<Bf16>(n * hv * p.value_dim);
    dg_ = DeviceArray<float>(n * hv);
    dbeta_ = DeviceArray<float>(n * hv);
    g_cum_ = DeviceArray<float>(n * hv);
    q_rstd_ = DeviceArray<float>(n * hk);
    k_rstd_ = DeviceArray<float>(n * hk);
    const std::size_t states = std::size_t(p.sequences()) * hv * p.key_dim * p.value_dim;
    final_ = DeviceArray<float>(states);
    d_initial_ = DeviceArray<float>(states);
    scratch_ = DeviceArray<char>(std::max(kernels::gdn_chunk_forward_scratch(shape_),
                                          kernels::gdn_chunk_backward_scratch(shape_)));
    table_ = kernels::gdn_chunk_table_at(table_memory_.get(), n, p.sequences());
  }

  void poison() {
    for (auto* x : {&o_, &n_, &dq_, &dk_, &dv_}) x->poison();
    for (auto* x : {&dg_, &dbeta_, &final_, &d_initial_, &g_cum_, &q_rstd_, &k_rstd_}) x->poison();
    scratch_.poison();
  }

  void make_table(cudaStream_t stream) {
    context_.stream = stream;
    kernels::gdn_chunk_table({bounds_.get(), false, shape_.tokens, shape_.sequences, table_},
                             context_);
  }
  void forward(cudaStream_t stream) {
    context_.stream = stream;
    context_.scratch = scratch_.get();
    context_.scratch_bytes = static_cast<std::int64_t>(scratch_.size());
    kernels::GdnChunkForwardParams f;
    common(f);
    f.g = g_.get();
    f.o = o_.get();
    f.final_state = final_.get();
    f.n = n_.get();
    f.g_cum = g_cum_.get();
    f.q_rstd = q_rstd_.get();
    f.k_rstd = k_rstd_.get();
    kernels::gdn_chunk_forward(f, context_);
  }
  void backward(cudaStream_t stream) {
    context_.stream = stream;
    context_.scratch = scratch_.get();
    context_.scratch_bytes = static_cast<std::int64_t>(scratch_.size());
    kernels::GdnChunkBackwardParams b;
    common(b);
    b.g_cum = g_cum_.get();
    b.n = n_.get();
    b.d_o = d_o_view_;
    b.d_final_state = d_final_.get();
    b.dq = dq_.get();
    b.dk = dk_.get();
    b.dv = dv_.get();
    b.dg = dg_.get();
    b.dbeta = dbeta_.get();
    b.d_initial_state = d_initial_.get();
    kernels::gdn_chunk_backward(b, context_);
  }

  // Results in double, and all their bits for exact comparison.
  RuleResult results() {
    RuleResult r;
    r.o = widen(o_.download());
    r.final_state = widen(final_.download());
    r.dq = widen(dq_.download());
    r.dk = widen(dk_.download());
    r.dv = widen(dv_.download());
    r.dg = widen(dg_.download());
    r.dbeta = widen(dbeta_.download());
    r.d_initial = widen(d_initial_.download());
    return r;
  }
  bool guards_intact() const {
    bool ok = scratch_.guard_intact() && table_memory_.guard_intact();
    for (auto* x : {&o_, &n_, &dq_, &dk_, &dv_}) ok = ok && x->guard_intact();
    for (auto* x : {&dg_, &dbeta_, &final_, &d_initial_, &g_cum_, &q_rstd_, &k_rstd_})
      ok = ok && x->guard_intact();
    return ok;
  }
  const DeviceArray<char>& scratch() const { return scratch_; }
  const DeviceArray<Bf16>& n() const { return n_; }
  const kernels::GdnShape& shape() const { return shape_; }

private:
  template <class P>
  void common(P& p) {
    p.shape = shape_;
    p.table = table_;
    p.q = q_view_;
    p.k = k_view_;
    p.v = v_view_;
    p.beta = beta_.get();
    p.scale = static_cast<float>(p_.scale);
    p.l2_norm = p_.l2_norm;
    p.l2_epsilon = static_cast<float>(p_.epsilon);
    p.initial_state = initial_.get();
  }

  // Padding rows of the inputs hold NaN: nothing may read them into a result.
  void place(Placement placement) {
    const std::int64_t n = p_.tokens(), hk = p_.key_heads, hv = p_.value_heads(), K = p_.key_dim,
                       V = p_.value_dim;
    const std::int64_t used = n - p_.padding, wide = 2 * hk * K + hv * V;
    struct Input {
      const std::vector<double>& data;
      std::int64_t heads, width, offset; // offset inside a projected row
      kernels::GdnTokens& view;
      bool projected;
    };
    const Input inputs[] = {{p_.q, hk, K, 0, q_view_, true},
                            {p_.k, hk, K, hk * K, k_view_, true},
                            {p_.v, hv, V, 2 * hk * K, v_view_, true},
                            {p_.d_o, hv, V, 0, d_o_view_, false}};
    std::vector<Bf16> projection(placement == Placement::kProjected ? n * wide : 0, Bf16{0x7fff});
    for (const Input& in : inputs) {
      const bool sliced = placement == Placement::kProjected && in.projected;
      const bool head_major = placement == Placement::kHeadMajor;
      const std::int64_t token_stride = sliced ? wide : head_major ? in.width : in.heads * in.width;
      const std::int64_t head_stride = head_major ? n * in.width : in.width;
      std::vector<Bf16> own(sliced ? 0 : n * in.heads * in.width, Bf16{0x7fff});
      auto& target = sliced ? projection : own;
      for (std::int64_t t = 0; t < used; ++t)
        for (std::int64_t h = 0; h < in.heads; ++h)
          for (std::int64_t i = 0; i < in.width; ++i)
            target[(sliced ? in.offset : 0) + t * token_stride + h * head_stride + i] =
                to_bf16(static_cast<float>(in.data[(t * in.heads + h) * in.width + i]));
      in.view = {nullptr, token_stride, head_stride};
      if (!sliced) {
        inputs_.emplace_back(own);
        in.view.data = inputs_.back().get();
      }
    }
    if (placement == Placement::kProjected) {
      inputs_.emplace_back(projection);
      for (const Input& in : inputs)
        if (in.projected) in.view.data = inputs_.back().get() + in.offset;
    }
  }

  RuleProblem p_;
  kernels::GdnShape shape_;
  kernels::LaunchContext context_;
  kernels::GdnChunkTable table_{};
  std::vector<DeviceArray<Bf16>> inputs_;
  kernels::GdnTokens q_view_, k_view_, v_view_, d_o_view_;
  DeviceArray<std::int32_t> bounds_;
  DeviceArray<char> table_memory_, scratch_;
  DeviceArray<float> g_, beta_, initial_, d_final_;
  DeviceArray<Bf16> o_, n_, dq_, dk_, dv_;
  DeviceArray<float> dg_, dbeta_, final_, d_initial_, g_cum_, q_rstd_, k_rstd_;
};

} // namespace gdn::gpu_test
