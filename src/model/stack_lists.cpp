#include "model/stack_lists.h"

#include "model/megatron/ends.h"
#include "model/megatron/layer.h"
#include "model/native/ends.h"
#include "model/native/layer.h"

namespace gdn::model {

namespace {

bool is_native(const config::Run& run) { return run.stack == "native"; }

} // namespace

OpList decoder_layer(const config::Model& model, const config::Run& run, config::LayerKind mixer, config::MlpKind mlp) {
  return is_native(run) ? native::decoder_layer(model, run, mixer, mlp) : megatron::decoder_layer(model, run, mixer, mlp);
}

OpList module_list(const config::Model& model, const config::Run& run, std::string_view module) {
  return is_native(run) ? native::module_list(model, run, module) : megatron::module_list(model, run, module);
}

OpList embedding_unit(const config::Model& model, const config::Run& run) {
  return is_native(run) ? native::embedding_unit(model, run) : megatron::embedding_unit(model, run);
}

OpList head_unit(const config::Model& model, const config::Run& run) {
  return is_native(run) ? native::head_unit(model, run) : megatron::head_unit(model, run);
}

} // namespace gdn::model
