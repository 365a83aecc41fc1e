#include "model/native/layer.h"

#include <fmt/core.h>

#include "core/error.h"
#include "model/kinds/plumbing.h"
#include "model/native/attention.h"
#include "model/native/gdn.h"
#include "model/native/mlp.h"
#include "model/native/moe.h"

namespace gdn::model::native {

using config::LayerKind;
using config::MlpKind;

namespace {

TensorId mixer_of(Builder& b, TensorId x, const config::Model& model, const config::Run& run, const Dims& d, LayerKind kind) {
  switch (kind) {
  case LayerKind::Gdn: return gdn_mixer(b, x, model, run, d);
  case LayerKind::Gdn2: return gdn2_mixer(b, x, model, run, d);
  case LayerKind::Attention: return attention_mixer(b, x, model, run, d);
  case LayerKind::Unmodelled: break;
  }
  throw Error(ErrorCode::Config, fmt::format("model '{}': layers of kind '{}' have no op list", model.name,
                                             model.unmodelled_kind.empty() ? "unmodelled" : model.unmodelled_kind),
              "only parameter totals are known for this model");
}

} // namespace

TensorId layer(Builder& b, TensorId x, const config::Model& model, const config::Run& run, const Dims& d, LayerKind mixer,
               MlpKind mlp) {
  const bool dropout = run.hidden_dropout > 0;
  TensorId mixed = mixer_of(b, x, model, run, d, mixer);
  TensorId m = residual_add(b, "mixer_add", x, mixed, "m", dropout);
  TensorId fed = mlp == MlpKind::Moe ? moe(b, m, model, run, d) : dense_mlp(b, m, model, run, d);
  return residual_add(b, "mlp_add", m, fed, "x_out", dropout);
}

OpList decoder_layer(const config::Model& model, const config::Run& run, LayerKind mixer, MlpKind mlp) {
  const Dims d = Dims::of(model, run);
  Builder b(fmt::format("{}.{}", config::name_of(mixer), config::name_of(mlp)));
  TensorId x = b.input("x", d.dtype, {d.tokens_sp, d.hidden});
  TensorId out = layer(b, x, model, run, d, mixer, mlp);
  return b.finish(out, d.tokens);
}

OpList module_list(const config::Model& model, const config::Run& run, std::string_view module) {
  const Dims d = Dims::of(model, run);
  Builder b{std::string(module)};
  TensorId x = b.input("x", d.dtype, {d.tokens_sp, d.hidden}, true);
  TensorId out = -1;
  if (module == "gdn") out = gdn_mixer(b, x, model, run, d);
  else if (module == "gdn2") out = gdn2_mixer(b, x, model, run, d);
  else if (module == "attention") out = attention_mixer(b, x, model, run, d);
  else if (module == "moe") out = moe(b, x, model, run, d);
  else if (module == "mlp") out = dense_mlp(b, x, model, run, d);
  else
    throw Error(ErrorCode::Usage, fmt::format("no module '{}'{}", module,
                                              did_you_mean(std::string(module), {"gdn", "gdn2", "attention", "moe", "mlp"})),
                "one of gdn, gdn2, attention, moe, mlp");
  b.hold(out, HoldKind::Caller);
  return b.finish(out, d.tokens);
}

} // namespace gdn::model::native
