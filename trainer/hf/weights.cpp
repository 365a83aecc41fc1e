#include "trainer/hf/weights.h"

#include <algorithm>

#include <fmt/core.h>

#include "core/error.h"
#include "trainer/hf/architecture.h"
#include "trainer/hf/config_json.h"

namespace gdn::trainer::hf {

namespace {

void require_whole(const ParameterSlot& slot) {
  if (slot.elements != slot.parameter->elements())
    throw Error(ErrorCode::Config, fmt::format("'{}': this rank holds {} of {} elements; Hugging Face checkpoints are read and "
                                               "written by runs on one rank", slot.name(), slot.elements, slot.parameter->elements()));
}

// Dense and MoE layers side by side are only Qwen3-Next's.
std::string model_type_for(const config::Model& m) {
  const auto moe = std::count(m.mlps.begin(), m.mlps.end(), config::MlpKind::Moe);
  if (moe == 0) return "qwen3_5_text";
  return moe == m.layers() && m.moe.renormalise ? "qwen3_5_moe_text" : "qwen3_next";
}

} // namespace

void load(const Checkpoint& checkpoint, Parameters& parameters) {
  for (const ParameterSlot& slot : parameters.slots()) {
    require_whole(slot);
    parameters.set_weights(slot.name(), checkpoint.read(*slot.parameter));
  }
}

void store(Parameters& parameters, Export& out) {
  for (const ParameterSlot& slot : parameters.slots()) {
    require_whole(slot);
    out.put(*slot.parameter, parameters.weights(slot.name()));
  }
}

RunWeights::RunWeights(const config::Model& model, const std::string& from, const std::string& to)
    : model_(model), from_(from), to_(to) {
  if (!from_.empty()) require_same_architecture(model_, from_);
  if (!to_.empty()) StagedFolder::require_free(to_);
  if (!to_.empty() && from_.empty()) require_expressible(model_, model_type_for(model_));
}

void RunWeights::load_into(Parameters& parameters) {
  if (from_.empty()) return;
  checkpoint_.emplace(from_, model_, parameters.table());
  load(*checkpoint_, parameters);
}

void RunWeights::store_from(Parameters& parameters, DType dtype) {
  if (to_.empty()) return;
  auto write = [&](Export out) {
    store(parameters, out);
    out.commit();
  };
  if (checkpoint_) return write(Export(to_, *checkpoint_));
  config::Model trained = model_;
  const auto& all = parameters.table().parameters;
  if (std::none_of(all.begin(), all.end(), [](const model::Parameter& p) { return p.part == model::Part::Mtp; })) trained.mtp_layers = 0;
  write(Export(to_, trained, parameters.table(), {.model_type = model_type_for(model_), .dtype = dtype}));
}

std::string RunWeights::note() const {
  if (!checkpoint_ || checkpoint_->not_read().empty()) return "";
  return fmt::format("{}: {} tensors are not trained (the first is {}){}", from_.string(), checkpoint_->not_read().size(),
                     checkpoint_->not_read().front(), to_.empty() ? "" : " and copied to the export");
}

} // namespace gdn::trainer::hf
