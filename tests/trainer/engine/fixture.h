#pragma once
#include <vector>

#include "reference/random.h"
#include "trainer/cpu/device.h"
#include "trainer/session.h"

// Small models with every layer kind, and batches drawn from a counter.
namespace gdn::trainer::fixture {

using config::LayerKind;
using config::MlpKind;

inline config::Model model(std::vector<LayerKind> mixers, std::vector<MlpKind> mlps) {
  config::Model m;
  m.name = "test";
  m.hidden = 32;
  m.vocab = 128;
  m.mixers = std::move(mixers);
  m.mlps = std::move(mlps);
  m.gdn.key_heads = 2;
  m.gdn.value_heads = 4;
  m.gdn.key_head_dim = 16;
  m.gdn.value_head_dim = 16;
  m.attention.heads = 4;
  m.attention.kv_heads = 2;
  m.attention.head_dim = 16;
  m.attention.rotary_fraction = 0.5;
  m.moe.experts = 4;
  m.moe.top_k = 2;
  m.moe.ffn = 16;
  m.moe.shared_ffn = 16;
  m.ffn = 48;
  return m;
}

// One of each: GDN and attention over experts, a dense MLP in between.
inline config::Model hybrid() {
  return model({LayerKind::Gdn, LayerKind::Gdn, LayerKind::Attention}, {MlpKind::Moe, MlpKind::Dense, MlpKind::Moe});
}

inline config::Run run(std::int64_t micro_batches = 1) {
  config::Run r;
  r.seq = 80; // more than one chunk of 64, and a tail
  r.micro_batch = 1;
  r.global_batch = micro_batches;
  return r;
}

inline std::vector<Batch> batches(const config::Model& m, const config::Run& r, std::uint64_t seed = 1) {
  std::vector<Batch> out;
  for (std::int64_t i = 0; i < r.micro_batches(); ++i) {
    const reference::RandomStream random{.seed = seed, .micro_batch = static_cast<std::uint64_t>(i)};
    Batch b;
    const auto n = static_cast<std::uint64_t>(r.micro_batch * r.seq);
    for (std::uint64_t t = 0; t < n; ++t) {
      b.ids.push_back(static_cast<std::int64_t>(random.bits(2 * t) % static_cast<std::uint64_t>(m.vocab)));
      b.labels.push_back(static_cast<std::int64_t>(random.bits(2 * t + 1) % static_cast<std::uint64_t>(m.vocab)));
    }
    if (n > 3) b.labels[3] = -100;
    b.sequences = dense_sequences(r.micro_batch, r.seq);
    out.push_back(std::move(b));
  }
  return out;
}

inline plan::Setting modules(std::vector<std::string> names) {
  plan::Setting s;
  s.granularity = names.empty() ? config::Granularity::None : config::Granularity::Selective;
  s.modules = std::move(names);
  return s;
}

// Loss and every gradient of one step, for exact comparison.
struct Outcome {
  StepResult result;
  std::vector<std::vector<float>> gradients;
};
inline Outcome outcome(Session& session, const std::vector<Batch>& batches) {
  Outcome o{session.run(batches), {}};
  for (const ParameterSlot& s : session.parameters().slots()) o.gradients.push_back(session.parameters().gradient(s.name()));
  return o;
}

} // namespace gdn::trainer::fixture
