#include "model/megatron/layer.h"

#include <fmt/core.h>

#include "core/error.h"
#include "model/kinds/linear.h"
#include "model/kinds/plumbing.h"
#include "model/megatron/attention.h"
#include "model/megatron/gdn.h"
#include "model/megatron/mlp.h"

namespace gdn::model::megatron {

using config::Build;
using config::LayerKind;
using config::MlpKind;

namespace {

// A norm that is a module of its own. Recomputing it (module `layernorm`) drops its output alone: the
// row statistic stays, so the op that reads the output holds it. `then` appends that op first.
template <class Then>
TensorId separate_norm(Builder& b, std::string name, TensorId x, ParamRef weight, const config::Model& model, std::string out,
                       Then then) {
  NormOutputs norm = rms_norm(b, std::move(name), x, std::move(weight), {model.norm_eps, model.zero_centred_norm}, std::move(out));
  const size_t reader = b.list().ops.size();
  TensorId result = then(norm.y);
  b.list().ops[reader].pins.push_back({norm.rstd, "recomputing the norm drops its output, not its statistic"});
  return result;
}

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
  const bool local = run.build == Build::Local, dropout = run.hidden_dropout > 0;
  auto run_mixer = [&](TensorId h) { return mixer_of(b, h, model, run, d, mixer); };
  auto run_moe = [&](TensorId h) { return moe(b, h, model, run, d); };
  auto run_mlp = [&](TensorId h) { return dense_mlp(b, h, model, run, d); };

  TensorId mixed = local ? separate_norm(b, "input_layernorm", x, b.param("input_norm", d.hidden, d.dtype), model, "ln_out", run_mixer)
                         : run_mixer(x);
  TensorId m = residual_add(b, "mixer_bda", x, mixed, "m_in", dropout);
  const ParamRef gain = b.param("mlp_norm", d.hidden, d.dtype);
  TensorId fed = mlp == MlpKind::Moe ? separate_norm(b, "pre_mlp_layernorm", m, gain, model, "m_y", run_moe)
                 : local             ? separate_norm(b, "pre_mlp_layernorm", m, gain, model, "m_y", run_mlp)
                                     : run_mlp(m);
  return residual_add(b, "mlp_bda", m, fed, "x_out", dropout);
}

OpList decoder_layer(const config::Model& model, const config::Run& run, LayerKind mixer, MlpKind mlp) {
  const Dims d = Dims::of(model, run);
  Builder b(fmt::format("{}.{}", config::name_of(mixer), config::name_of(mlp)));
  b.freeze(run.lora.rank > 0);
  TensorId x = b.input("x", d.dtype, {d.tokens_sp, d.hidden});
  TensorId out = layer(b, x, model, run, d, mixer, mlp);
  return b.finish(out, d.tokens);
}

OpList module_list(const config::Model& model, const config::Run& run, std::string_view module) {
  const Dims d = Dims::of(model, run);
  Builder b{std::string(module)};
  b.freeze(run.lora.rank > 0);
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

} // namespace gdn::model::megatron
