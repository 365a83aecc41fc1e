#include "model/stack_lists.h"

#include "model/fp8.h"
#include "model/megatron/ends.h"
#include "model/megatron/layer.h"
#include "model/native/ends.h"
#include "model/native/layer.h"

namespace gdn::model {

namespace {

bool is_native(const config::Run& run) { return run.stack == "native"; }

} // namespace

OpList decoder_layer(const config::Model& model, const config::Run& run, config::LayerKind mixer, config::MlpKind mlp) {
  if (is_native(run)) return native::decoder_layer(model, run, mixer, mlp);
  OpList list = megatron::decoder_layer(model, run, mixer, mlp);
  quantise_inputs(list, run);
  return list;
}

OpList module_list(const config::Model& model, const config::Run& run, std::string_view module) {
  if (is_native(run)) return native::module_list(model, run, module);
  OpList list = megatron::module_list(model, run, module);
  quantise_inputs(list, run);
  return list;
}

OpList embedding_unit(const config::Model& model, const config::Run& run) {
  return is_native(run) ? native::embedding_unit(model, run) : megatron::embedding_unit(model, run);
}

OpList head_unit(const config::Model& model, const config::Run& run) {
  if (is_native(run)) return native::head_unit(model, run);
  OpList list = megatron::head_unit(model, run);
  quantise_inputs(list, run); // MTP layers
  return list;
}

} // namespace gdn::model
