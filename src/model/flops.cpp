#include "model/flops.h"

#include <map>

#include "model/megatron/ends.h"
#include "model/megatron/layer.h"

namespace gdn::model {

using config::LayerKind;

namespace {

// The smallest m with: layer i is attention exactly when (i + 1) % m == 0; 0 when there is none.
std::int64_t attention_frequency(const config::Model& model) {
  const std::int64_t layers = model.layers();
  for (std::int64_t m = 1; m <= layers; ++m) {
    bool fits = true;
    for (std::int64_t i = 0; i < layers; ++i)
      fits = fits && (model.mixers[static_cast<size_t>(i)] == LayerKind::Attention) == ((i + 1) % m == 0);
    if (fits) return m;
  }
  return 0;
}

LayerKind counted_mixer(const config::Model& model, std::int64_t depth, MtpMixer rule) {
  const std::int64_t m = attention_frequency(model);
  if (rule == MtpMixer::LastLayer || m == 0) return model.mixers.back();
  const bool attention = (model.layers() + depth + 1) % m == 0;
  return attention || m == 1 ? LayerKind::Attention : model.mixers.front();
}

Flops sum(const OpList& list) {
  Flops total = 0;
  for (const Op& op : list.ops) total += op.model_flops;
  return total / static_cast<double>(list.tokens);
}

} // namespace

ModelFlops model_flops_per_token(const config::Model& model, std::int64_t seq, bool with_mtp, MtpMixer rule) {
  config::Run run;
  run.seq = seq;
  std::map<std::pair<LayerKind, config::MlpKind>, Flops> known;
  auto layer = [&](LayerKind mixer, config::MlpKind mlp) {
    auto [it, fresh] = known.try_emplace({mixer, mlp}, 0);
    if (fresh) it->second = sum(megatron::decoder_layer(model, run, mixer, mlp));
    return it->second;
  };
  ModelFlops flops;
  for (size_t i = 0; i < model.mixers.size(); ++i) flops.layers += layer(model.mixers[i], model.mlps[i]);
  run.train_mtp = false;
  flops.head = sum(megatron::head_unit(model, run));
  if (!with_mtp || model.mtp_layers == 0) return flops;
  run.train_mtp = true;
  flops.mtp = sum(megatron::head_unit(model, run)) - flops.head;
  for (std::int64_t i = 0; i < model.mtp_layers; ++i)
    flops.mtp += layer(counted_mixer(model, i, rule), model.mlps.back()) - layer(model.mixers.back(), model.mlps.back());
  return flops;
}

} // namespace gdn::model
