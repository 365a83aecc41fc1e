#include <algorithm>
#include <cmath>
#include <limits>

#include <doctest/doctest.h>
#include <fmt/core.h>

#include "config/profiles.h"
#include "core/error.h"
#include "identical.h"
#include "plan/plan.h"

using namespace gdn;
using namespace gdn::trainer;
using config::LayerKind;
using config::MlpKind;

namespace {

// Small enough that hundreds of settings run in seconds; two sequences, so that boundaries matter.
config::Run small_run(const std::string& stack, std::int64_t micro_batches = 1) {
  config::Run r = fixture::run(micro_batches);
  r.seq = 12;
  r.micro_batch = 2;
  r.global_batch = 2 * micro_batches;
  r.stack = stack;
  return r;
}

config::Model small(std::vector<LayerKind> mixers, std::vector<MlpKind> mlps) {
  config::Model m = fixture::model(std::move(mixers), std::move(mlps));
  m.hidden = 16;
  m.vocab = 32;
  m.gdn.key_head_dim = m.gdn.value_head_dim = 8;
  m.attention.head_dim = 8;
  m.moe.ffn = m.moe.shared_ffn = 8;
  m.ffn = 16;
  return m;
}

void check_identical(Session& s, const std::vector<plan::Setting>& settings) {
  CHECK(fixture::check_identical(s, settings, fixture::is_hypothetical) > settings.size() / 2);
}

// Settings of at most `most` modules, and one in `every` of the larger ones.
std::vector<plan::Setting> thinned(std::vector<plan::Setting> all, size_t most, size_t every) {
  std::vector<plan::Setting> out;
  for (size_t i = 0; i < all.size(); ++i)
    if (all[i].modules.size() <= most || i % every == 0 || i + 1 == all.size()) out.push_back(all[i]);
  return out;
}

} // namespace

TEST_CASE("megatron: every legal setting changes no bit of loss and gradients") {
  CpuDevice device;
  config::Run run = small_run("megatron");
  run.revision = Revision::parse("dev+gdn_qkv+gdn_in_proj_conv");
  Session s(small({LayerKind::Gdn, LayerKind::Attention}, {MlpKind::Moe, MlpKind::Dense}), run, device);
  const auto settings = plan::legal_settings(s.workload(), false);
  CHECK(settings.size() > 200);
  check_identical(s, thinned(settings, 2, 3));
}

TEST_CASE("megatron: hypothetical forms and user spans") {
  CpuDevice device;
  config::Run run = small_run("megatron");
  run.recompute.user_spans = {{"front", "conv1d", "gates", true}, {"experts", "expert_fc1", "unpermute", false}};
  Session s(small({LayerKind::Gdn, LayerKind::Attention}, {MlpKind::Moe, MlpKind::Moe}), run, device);
  const auto settings = plan::legal_settings(s.workload(), true);
  const auto with_spans = std::count_if(settings.begin(), settings.end(), [](const auto& x) { return !x.user_spans.empty(); });
  const auto discards = std::count_if(settings.begin(), settings.end(), [](const plan::Setting& x) {
    return std::any_of(x.modules.begin(), x.modules.end(), [](const auto& m) { return m.find(":discard") != std::string::npos; });
  });
  CHECK(with_spans > 0);
  CHECK(discards > 0);
  check_identical(s, thinned(settings, 1, settings.size() / 60));
}

TEST_CASE("megatron: the other forms of the stack") {
  struct Case {
    const char* what;
    void (*change)(config::Model&, config::Run&);
  };
  const Case cases[] = {
      {"build local", [](config::Model&, config::Run& r) { r.build = config::Build::Local; }},
      {"normalisation in the kernel", [](config::Model&, config::Run& r) {
         r.revision = Revision::parse("main+gdn_qkv+l2norm_kernel");
         r.l2norm = config::L2Norm::Kernel;
       }},
      {"no q/k norm", [](config::Model& m, config::Run&) { m.gdn.use_qk_l2norm = false; }},
      {"biases", [](config::Model& m, config::Run&) { m.gdn.bias = m.gdn.conv_bias = m.attention.qkv_bias = true; }},
      {"gdn2", [](config::Model& m, config::Run&) { m.mixers = {LayerKind::Gdn2, LayerKind::Gdn2}; }},
      {"tied embeddings, MTP", [](config::Model& m, config::Run&) { m.tied_embeddings = true; m.mtp_layers = 2; }},
      {"fused loss", [](config::Model&, config::Run& r) { r.cross_entropy = config::CrossEntropy::FusedTe; }},
      {"chunked loss", [](config::Model&, config::Run& r) {
         r.cross_entropy = config::CrossEntropy::ChunkedLinear;
         r.loss_chunk = 7;
       }},
      {"fp32", [](config::Model&, config::Run& r) { r.dtype = DType::FP32; }},
      {"unfused permutation, all experts scored", [](config::Model& m, config::Run& r) {
         r.moe_permute_fusion = false;
         m.moe.renormalise = false;
         m.moe.z_loss_coeff = 1e-3;
       }},
      {"bf16 router, no shared gate", [](config::Model& m, config::Run&) {
         m.moe.router_dtype = DType::BF16;
         m.moe.shared_gate = false;
       }},
      {"no output gate, no q/k norm, no rotation", [](config::Model& m, config::Run&) {
         m.attention.output_gate = m.attention.qk_norm = m.attention.rope = false;
       }},
      {"several micro-batches", [](config::Model&, config::Run& r) { r.global_batch = 6; }},
  };
  for (const Case& c : cases) {
    CAPTURE(std::string(c.what));
    config::Model m = small({LayerKind::Gdn, LayerKind::Attention}, {MlpKind::Moe, MlpKind::Moe});
    config::Run r = small_run("megatron");
    c.change(m, r);
    CpuDevice device;
    Session s(m, r, device);
    const auto settings = plan::legal_settings(s.workload(), false);
    check_identical(s, thinned(settings, 0, std::max<size_t>(1, settings.size() / 8)));
  }
}

TEST_CASE("native: every default rebuild off, on, and with every module") {
  CpuDevice device;
  Session s(small({LayerKind::Gdn, LayerKind::Attention}, {MlpKind::Moe, MlpKind::Dense}), small_run("native"), device);
  auto settings = plan::legal_settings(s.workload(), false);
  CHECK(settings.size() > 20);
  check_identical(s, thinned(settings, 1, std::max<size_t>(1, settings.size() / 60)));
}

TEST_CASE("native: the other forms of the model") {
  for (auto change : {+[](config::Model& m, config::Run&) { m.gdn.use_qk_l2norm = false; },
                      +[](config::Model& m, config::Run&) { m.gdn.bias = m.gdn.conv_bias = true; },
                      +[](config::Model& m, config::Run&) { m.mixers = {LayerKind::Gdn2, LayerKind::Gdn2}; },
                      +[](config::Model& m, config::Run&) { m.attention.kv_heads = 4; m.attention.whole_vector_qk_norm = true; },
                      +[](config::Model& m, config::Run& r) { m.mtp_layers = 1; r.cross_entropy = config::CrossEntropy::FusedTe; },
                      +[](config::Model& m, config::Run& r) { m.moe.renormalise = false; m.moe.z_loss_coeff = 1e-3; r.dtype = DType::FP32; }}) {
    config::Model m = small({LayerKind::Gdn, LayerKind::Attention}, {MlpKind::Moe, MlpKind::Moe});
    config::Run r = small_run("native");
    change(m, r);
    CpuDevice device;
    Session s(m, r, device);
    const auto settings = plan::legal_settings(s.workload(), false);
    check_identical(s, thinned(settings, 0, std::max<size_t>(1, settings.size() / 6)));
  }
}

TEST_CASE("both stacks compute the same model") {
  const config::Model m = small({LayerKind::Gdn, LayerKind::Attention}, {MlpKind::Moe, MlpKind::Dense});
  std::vector<fixture::Outcome> out;
  for (const char* stack : {"megatron", "native"}) {
    config::Run r = small_run(stack);
    r.dtype = DType::FP32;
    CpuDevice device;
    Session s(m, r, device);
    s.parameters().initialise(3);
    s.use({});
    out.push_back(fixture::outcome(s, fixture::batches(m, r)));
  }
  // fp32 arithmetic in another order of operations: 2^-24 per rounding, a few hundred of them in a row.
  CHECK(out[0].result.loss == doctest::Approx(out[1].result.loss).epsilon(1e-5));
  CHECK(out[0].result.expert_load == out[1].result.expert_load);
  for (size_t i = 0; i < out[0].gradients.size(); ++i) {
    double difference = 0, norm = 0;
    for (size_t j = 0; j < out[0].gradients[i].size(); ++j) {
      difference += std::pow(out[0].gradients[i][j] - out[1].gradients[i][j], 2);
      norm += std::pow(out[0].gradients[i][j], 2);
    }
    CAPTURE(i);
    CHECK(std::sqrt(difference) <= 1e-4 * std::sqrt(norm) + 1e-9);
  }
}

TEST_CASE("megatron, laid out for the upstream provider: its scratch is reserved, the results are the same bits") {
  CpuDevice device;
  const config::Model m = small({LayerKind::Gdn, LayerKind::Attention}, {MlpKind::Moe, MlpKind::Dense});
  const config::Run run = small_run("megatron");
  Session own(m, run, device), upstream(m, run, device, std::numeric_limits<Bytes>::max(), &model::upstream_provider());
  const auto batches = fixture::batches(m, run);
  std::vector<double> losses;
  for (Session* s : {&own, &upstream}) {
    s->parameters().initialise(3);
    s->use({});
    losses.push_back(fixture::outcome(*s, batches).result.loss);
  }
  CHECK(losses[0] == losses[1]);
  const auto settings = plan::legal_settings(upstream.workload(), false);
  check_identical(upstream, thinned(settings, 1, 16));
}

TEST_CASE("every built-in model at reduced size, both stacks") {
  const config::Profiles profiles;
  size_t ran = 0;
  for (const config::Profiles::Listed& listed : profiles.models()) {
    config::ModelProfile p = profiles.model(listed.name);
    config::Model m = p.model;
    if (m.parameters_only || m.moe.score == "sigmoid") continue;
    CAPTURE(m.name);
    // The shape of the model (layer kinds, head ratios, options) at a width that runs in milliseconds.
    const std::int64_t expansion = m.gdn.expansion(), groups = std::min<std::int64_t>(2, m.attention.kv_heads);
    const std::int64_t queries = std::min<std::int64_t>(4, m.attention.heads / m.attention.kv_heads * groups);
    m.mixers.resize(std::min<size_t>(m.mixers.size(), 4));
    m.mlps.resize(m.mixers.size());
    m.vision.reset();
    m.hidden = 16;
    m.vocab = 32;
    m.gdn.key_heads = 2;
    m.gdn.value_heads = 2 * std::min<std::int64_t>(2, expansion);
    m.gdn.key_head_dim = 8;
    m.gdn.value_head_dim = m.gdn.value_head_dim > m.gdn.key_head_dim ? 16 : 8;
    m.attention.kv_heads = groups;
    m.attention.heads = std::max(queries / groups, std::int64_t{1}) * groups;
    m.attention.head_dim = 8;
    m.moe.experts = std::min<std::int64_t>(m.moe.experts, 4);
    m.moe.top_k = std::min<std::int64_t>(m.moe.top_k, 2);
    m.moe.ffn = 8;
    m.moe.shared_ffn = std::min<std::int64_t>(m.moe.shared_ffn, 8);
    m.ffn = 16;
    m.mtp_layers = std::min<std::int64_t>(m.mtp_layers, 1);
    for (const char* stack : {"megatron", "native"}) {
      CAPTURE(std::string(stack));
      config::Run r = small_run(stack);
      r.cross_entropy = p.run.cross_entropy;
      CpuDevice device;
      Session s(m, r, device);
      const auto settings = plan::legal_settings(s.workload(), false);
      check_identical(s, thinned(settings, 0, std::max<size_t>(1, settings.size() / 3)));
      ++ran;
    }
  }
  CHECK(ran >= 20);
}
