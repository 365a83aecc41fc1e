#include "model/megatron/ends.h"

#include <fmt/core.h>

#include "model/builder.h"
#include "model/dims.h"
#include "model/kinds/ends.h"
#include "model/kinds/linear.h"
#include "model/kinds/plumbing.h"
#include "model/megatron/layer.h"

namespace gdn::model::megatron {

using config::CrossEntropy;

namespace {

// Word embeddings of `ids`; one table for the model and for every MTP depth.
TensorId embed(Builder& b, TensorId ids, const config::Run& run, const Dims& d, std::string out) {
  return embedding(b, "embedding", ids, {"embedding.word", d.local_vocab * d.hidden, d.dtype, !b.frozen()},
                   {d.hidden, d.tp, d.sp, run.hidden_dropout > 0}, d.dtype, std::move(out));
}

// Loss per token of the hidden states y [N_sp, h] against the batch's (shifted) labels.
TensorId head_loss(Builder& b, TensorId y, const config::Model& model, const config::Run& run, const Dims& d) {
  const ParamRef weight{model.tied_embeddings ? "embedding.word" : "head", d.local_vocab * d.hidden, d.dtype, !b.frozen()};
  LossAttr attr{.vocab = d.local_vocab, .chunk = 0};
  TensorId labels = data(b, "labels", d.tokens, "label_ids");
  if (run.cross_entropy == CrossEntropy::ChunkedLinear) {
    attr.chunk = run.loss_chunk > 0 ? run.loss_chunk : d.tokens;
    attr.form = LossForm::Logits;
    return linear_cross_entropy(b, "linear_cross_entropy", y, labels, weight, attr, d.tp, d.sp, "loss");
  }
  attr.fused = run.cross_entropy != CrossEntropy::Unfused;
  attr.form = run.cross_entropy == CrossEntropy::FusedTe ? LossForm::Overwrite : LossForm::Softmax;
  TensorId logits = lm_head(b, "lm_head", y, weight, d.local_vocab, d.tp, d.sp, attr.form, "logits"); // [N, Vp/tp]
  return cross_entropy(b, "cross_entropy", logits, labels, attr, d.tp, "loss");
}

// One depth of multi-token prediction: the hidden states of the depth before and the embeddings of
// the next tokens, merged, through one decoder layer of the last layer's kind.
TensorId mtp_depth(Builder& b, TensorId y, const config::Model& model, const config::Run& run, const Dims& d) {
  const NormAttr norm{model.norm_eps, model.zero_centred_norm};
  const std::int64_t h = d.hidden;
  // 2 * (3h + 2h^2) a token is Megatron's count: the three norms and eh_proj.
  auto count_norm = [&] { b.list().ops.back().model_flops = 2.0 * static_cast<double>(d.tokens_sp * h); };
  TensorId ids = data(b, "shifted_ids", d.tokens, "ids");
  TensorId e = embed(b, ids, run, d, "embedded");                                        // [N_sp, h]
  TensorId e_norm = rms_norm(b, "enorm", e, b.param("enorm", h, d.dtype), norm, "e_norm").y;
  count_norm();
  TensorId h_norm = rms_norm(b, "hnorm", y, b.param("hnorm", h, d.dtype), norm, "h_norm").y;
  count_norm();
  TensorId pair = concat(b, "eh_concat", {e_norm, h_norm}, Along::Columns, "eh");        // [N_sp, 2h]
  TensorId x = linear(b, "eh_proj", pair, b.param("eh_proj", 2 * h * h / d.tp, d.dtype), h / d.tp,
                      {TensorParallel::Column, d.tp, d.sp}, "eh_out");                   // [N, h/tp]
  if (d.tp > 1) x = gather_columns(b, "eh_proj.gather", x, d.tp, false, "eh_full");      // [N, h]
  if (d.sp) x = scatter_rows(b, "eh_proj.scatter", x, d.tp, "eh_shard");                 // [N_sp, h]
  const std::string scope = b.name_scope(), params = b.param_scope();
  b.scope(scope, params + "layer.");
  x = layer(b, x, model, run, d, model.mixers.back(), model.mlps.back());
  b.scope(scope, params);
  TensorId out = rms_norm(b, "final_norm", x, b.param("final_norm", h, d.dtype), norm, "y").y;
  count_norm();
  return out;
}

} // namespace

OpList embedding_unit(const config::Model& model, const config::Run& run) {
  const Dims d = Dims::of(model, run);
  Builder b("embedding");
  b.freeze(run.lora.rank > 0);
  TensorId ids = data(b, "ids", d.tokens, "token_ids");
  return b.finish(embed(b, ids, run, d, "x"), d.tokens);
}

OpList head_unit(const config::Model& model, const config::Run& run) {
  const Dims d = Dims::of(model, run);
  const std::int64_t depths = run.train_mtp ? model.mtp_layers : 0;
  Builder b("head");
  b.freeze(run.lora.rank > 0);
  TensorId x = b.input("x", d.dtype, {d.tokens_sp, d.hidden});
  std::vector<TensorId> hidden{rms_norm(b, "final_norm", x, b.param("final_norm", d.hidden, d.dtype),
                                        {model.norm_eps, model.zero_centred_norm}, "y").y};
  auto enter = [&](std::int64_t depth) { b.scope(fmt::format("mtp{}.", depth), fmt::format("mtp.{}.", depth)); };
  for (std::int64_t i = 0; i < depths; ++i) {
    enter(i);
    hidden.push_back(mtp_depth(b, hidden.back(), model, run, d));
  }
  b.scope("", "");
  if (depths > 0) { // all depths leave the decoder in one tensor, (1 + M) N_sp rows
    TensorId all = concat(b, "mtp_concat", hidden, Along::Rows, "y_all");
    std::vector<std::string> parts;
    for (std::int64_t i = 0; i <= depths; ++i) parts.push_back(fmt::format("y_part{}", i));
    hidden = split_rows(b, "mtp_chunk", all, parts);
  }
  std::vector<TensorId> losses;
  for (std::int64_t i = 0; i < depths; ++i) {
    enter(i);
    losses.push_back(head_loss(b, hidden[static_cast<size_t>(i) + 1], model, run, d));
  }
  b.scope("", "");
  losses.push_back(head_loss(b, hidden[0], model, run, d));
  loss_sum(b, "loss_sum", losses);
  return b.finish(-1, d.tokens);
}

} // namespace gdn::model::megatron
