#include <algorithm>
#include <cmath>

#include <doctest/doctest.h>
#include <fmt/core.h>

#include "capture.h"
#include "model/validate.h"

// The options of the GDN mixer through the whole engine: who normalises q and k, biases, initialisation.
using namespace gdn;
using namespace gdn::trainer;
using config::L2Norm;
using config::LayerKind;
using config::MlpKind;
using fixture::Captured;
using fixture::Values;

namespace {

config::Model two_layers(LayerKind mixer) {
  config::Model m = fixture::model({mixer, mixer}, {MlpKind::Dense, MlpKind::Moe});
  m.hidden = 16;
  m.vocab = 24;
  m.gdn.key_head_dim = m.gdn.value_head_dim = 8;
  m.ffn = 16;
  return m;
}

config::Run run_of(const std::string& stack, L2Norm l2norm) {
  config::Run r = fixture::run();
  r.stack = stack;
  r.dtype = DType::FP32;
  r.revision = Revision::parse("main+gdn_qkv+l2norm_kernel");
  r.l2norm = l2norm;
  return r;
}

Captured step(const config::Model& m, const config::Run& r, const std::function<void(const OpCall&)>& look = {}) {
  CpuDevice device;
  Session s(m, r, device);
  s.parameters().initialise(9);
  return fixture::capture(s, fixture::batches(m, r)[0], look);
}

void check_equal(const Captured& a, const Captured& b, double tolerance) {
  CHECK(std::abs(a.result.loss - b.result.loss) <= tolerance * b.result.loss);
  for (size_t l = 0; l < b.hidden.size(); ++l) CHECK(fixture::relative(a.hidden[l], b.hidden[l]) <= tolerance);
  for (const auto& [unit, g] : b.hidden_gradient) CHECK(fixture::relative(a.hidden_gradient.at(unit), g) <= tolerance);
  for (const auto& [name, g] : b.gradient) {
    CAPTURE(name);
    CHECK(fixture::relative(a.gradient.at(name), g) <= tolerance);
  }
}

std::vector<float> weights(const config::Model& m, const config::Run& r, const std::string& name, std::uint64_t seed) {
  CpuDevice device;
  Session session(m, r, device);
  Parameters& p = session.parameters();
  p.initialise(seed);
  return p.weights(name);
}

// Moments of U(lo, hi) and its ends, within what n draws allow (5 standard errors).
void check_uniform(const std::vector<double>& x, double lo, double hi) {
  const double n = static_cast<double>(x.size()), width = hi - lo;
  double mean = 0, square = 0;
  for (double v : x) {
    CHECK((v >= lo - 1e-6 * width && v <= hi + 1e-6 * width));
    mean += v / n;
  }
  for (double v : x) square += (v - mean) * (v - mean) / n;
  CHECK(std::abs(mean - (lo + hi) / 2) < 5 * width / std::sqrt(12 * n));
  CHECK(square == doctest::Approx(width * width / 12).scale(0).epsilon(5 * std::sqrt(0.8 / n))); // kurtosis 1.8
  CHECK(*std::min_element(x.begin(), x.end()) < lo + 10 * width / n);
  CHECK(*std::max_element(x.begin(), x.end()) > hi - 10 * width / n);
}

} // namespace

TEST_CASE("q and k normalised by the caller or inside the rule: the same layer") {
  const config::Model m = two_layers(LayerKind::Gdn);
  int callers = 0, kernels = 0;
  const Captured caller = step(m, run_of("megatron", L2Norm::Caller), [&](const OpCall& c) { callers += c.op().kind == model::OpKind::L2Norm; });
  const Captured kernel = step(m, run_of("megatron", L2Norm::Kernel), [&](const OpCall& c) {
    CHECK(c.op().kind != model::OpKind::L2Norm);
    kernels += c.op().kind == model::OpKind::Rule && c.attr<model::GdnAttr>().normalise;
  });
  CHECK(callers == 4); // two layers, forward and backward
  CHECK(kernels == 4);
  check_equal(kernel, caller, 1e-5);
  // Native's front end normalises: one route under both names.
  check_equal(step(m, run_of("native", L2Norm::Kernel)), step(m, run_of("native", L2Norm::Caller)), 0);
}

TEST_CASE("GDN2 keeps the caller's norm: asking for the kernel's is an error, and no list obeys it") {
  const config::Model m = two_layers(LayerKind::Gdn2);
  CHECK(model::any_rejected(model::validate(m, run_of("megatron", L2Norm::Kernel))));
  CHECK(!model::any_rejected(model::validate(m, run_of("megatron", L2Norm::Caller))));
  for (const char* stack : {"megatron", "native"})
    check_equal(step(m, run_of(stack, L2Norm::Kernel), [](const OpCall& c) {
                  if (c.op().kind == model::OpKind::Gdn2Rule) CHECK(!c.attr<model::GdnAttr>().normalise);
                }), step(m, run_of(stack, L2Norm::Caller)), 0);
}

TEST_CASE("without q/k norm neither side normalises, whoever was asked to") {
  for (LayerKind mixer : {LayerKind::Gdn, LayerKind::Gdn2})
    for (const char* stack : {"megatron", "native"}) {
      config::Model m = two_layers(mixer);
      const Captured normed = step(m, run_of(stack, L2Norm::Caller));
      m.gdn.use_qk_l2norm = false;
      Values conv, q;
      const Captured raw = step(m, run_of(stack, L2Norm::Caller), [&](const OpCall& c) {
        CHECK(c.op().kind != model::OpKind::L2Norm);
        if (c.step() >= 0) return;
        if (c.op().kind == model::OpKind::ConvSilu) conv = fixture::copy(c.out(0));
        if (c.op().kind == model::OpKind::Rule || c.op().kind == model::OpKind::Gdn2Rule) {
          CHECK(!c.attr<model::GdnAttr>().normalise);
          q = fixture::copy(c.in(0));
        }
      });
      CHECK(fixture::relative(raw.hidden[1], normed.hidden[1]) > 1e-4);
      check_equal(step(m, run_of(stack, L2Norm::Kernel)), raw, 0);
      check_equal(step(m, run_of(stack, L2Norm::Off)), raw, 0);
      if (std::string(stack) == "native") continue; // the front end is one op
      const size_t channels = 2 * 16 + 4 * 8, wide = 4 * 8; // q enters the rule as the convolution left it, heads repeated
      for (size_t t = 0; t < 80; ++t)
        for (size_t j = 0; j < wide; ++j) CHECK(q[t * wide + j] == conv[t * channels + j / 16 * 8 + j % 8]);
    }
}

TEST_CASE("bias, conv_bias and every other parameter of the mixer: gradients are slopes of the loss") {
  for (LayerKind mixer : {LayerKind::Gdn, LayerKind::Gdn2})
    for (const char* stack : {"megatron", "native"}) {
      config::Model m = two_layers(mixer);
      m.mlps = {MlpKind::Dense, MlpKind::Dense}; // no expert may change hands
      m.gdn.bias = m.gdn.conv_bias = true;
      const config::Run r = run_of(stack, L2Norm::Caller);
      CpuDevice device;
      Session s(m, r, device);
      s.parameters().initialise(9);
      const auto data = fixture::batches(m, r);
      std::vector<std::string> names;
      for (const ParameterSlot& p : s.parameters().slots()) {
        if (p.name().find("layers.0.gdn.") != 0) continue;
        names.push_back(p.name());
        std::vector<float> w = s.parameters().weights(p.name()); // larger, so that slopes stand out from rounding
        if (p.parameter->init == model::Init::Normal || p.parameter->init == model::Init::ScaledNormal)
          for (float& x : w) x *= 10;
        s.parameters().set_weights(p.name(), w);
      }
      CHECK(names.size() >= 9);
      s.use({});
      for (const std::string& name : names) {
        CAPTURE(name);
        CAPTURE(std::string(stack));
        s.run(data);
        const std::vector<float> w = s.parameters().weights(name), g = s.parameters().gradient(name);
        double norm = 0;
        for (float x : g) norm += static_cast<double>(x) * static_cast<double>(x);
        norm = std::sqrt(norm);
        CHECK(norm > 0);
        auto loss = [&](double by) {
          std::vector<float> moved = w;
          for (size_t i = 0; i < w.size(); ++i) moved[i] += static_cast<float>(by * g[i] / norm);
          s.parameters().set_weights(name, moved);
          const double l = s.run(data).loss;
          s.parameters().set_weights(name, w);
          return l;
        };
        const double h = std::clamp(2e-4 / norm, 5e-4, 1e-2); // far above the rounding of the loss, well below its curvature
        CHECK((loss(h) - loss(-h)) / (2 * h) == doctest::Approx(norm).epsilon(0.02));
      }
    }
}

TEST_CASE("initial weights are drawn as the reference draws them") {
  config::Model m = two_layers(LayerKind::Gdn);
  m.gdn.key_heads = 64;
  m.gdn.value_heads = 1152;
  m.gdn.key_head_dim = m.gdn.value_head_dim = 2;
  m.gdn.bias = m.gdn.conv_bias = true;
  m.hidden = 8;
  m.mixers = {LayerKind::Gdn};
  m.mlps = {MlpKind::Dense};
  const config::Run r = run_of("native", L2Norm::Caller);
  for (auto [lo, hi] : {std::pair{1.0, 16.0}, std::pair{0.0, 16.0}, std::pair{2.0, 3.0}}) { // A_init_range
    m.gdn.a_init_lo = lo;
    m.gdn.a_init_hi = hi;
    std::vector<double> a;
    for (std::uint64_t seed = 0; seed < 100; ++seed) // 1152 heads, 100 seeds: huggingface/transformers#47842
      if (seed < 10 || lo == 1)
        for (float x : weights(m, r, "layers.0.gdn.A_log", seed)) {
          if (!std::isfinite(x)) FAIL("an A_log that is not finite");
          a.push_back(std::exp(static_cast<double>(x)));
        }
    check_uniform(a, lo, hi);
  }
  auto doubles = [&](const char* name) {
    const std::vector<float> w = weights(m, r, name, 3);
    return std::vector<double>(w.begin(), w.end());
  };
  for (double b : doubles("layers.0.gdn.dt_bias")) CHECK(b == 1);
  check_uniform(doubles("layers.0.gdn.conv1d"), -0.5, 0.5); // PyTorch: 1 / sqrt(4 taps of one channel)
  check_uniform(doubles("layers.0.gdn.conv1d.bias"), -0.5, 0.5);
  m.gdn.conv_init = 0.02;
  check_uniform(doubles("layers.0.gdn.conv1d"), -0.02, 0.02);
  for (const char* name : {"layers.0.gdn.in_proj.bias", "layers.0.gdn.out_proj.bias"})
    for (double b : doubles(name)) CHECK(b == 0);

  m.mixers = {LayerKind::Gdn2}; // step sizes log-uniform in [1e-3, 0.1]
  m.gdn.key_head_dim = 16;
  std::vector<double> log_dt;
  for (double b : doubles("layers.0.gdn.dt_bias")) log_dt.push_back(std::log(std::log1p(std::exp(b))));
  CHECK(log_dt.size() == 64 * 16);
  check_uniform(log_dt, std::log(1e-3), std::log(0.1));
}

// Storing A_log in bf16 moves A by up to half a unit in the last place, 2^-7, where A_log is in [2, 2.77].
TEST_CASE("A_log is fp32 where the stack says so; in bf16 the decay moves by up to 0.78 %") {
  config::Model m = two_layers(LayerKind::Gdn);
  m.gdn.key_heads = 64;
  m.gdn.value_heads = 1152;
  m.gdn.key_head_dim = m.gdn.value_head_dim = 2;
  for (const char* stack : {"megatron", "native"}) {
    config::Run r = run_of(stack, L2Norm::Caller);
    r.dtype = DType::BF16;
    CpuDevice device;
    Session session(m, r, device);
    Parameters& p = session.parameters();
    p.initialise(4);
    const ParameterSlot& slot = p.at("layers.0.gdn.A_log");
    const Values live = fixture::copy(slot.value()), master = p.weights("layers.0.gdn.A_log");
    double most = 0;
    for (size_t i = 0; i < live.size(); ++i) most = std::max(most, std::abs(std::exp(static_cast<double>(live[i]) - static_cast<double>(master[i])) - 1));
    if (std::string(stack) == "native") CHECK(most == 0);
    else CHECK((most > 0.005 && most < 0.0079));
  }
}
