#include "trainer/hf/checkpoint.h"

#include <algorithm>
#include <cstring>
#include <unordered_set>

#include <fmt/format.h>

#include "config/json.h"
#include "config/text.h"
#include "core/error.h"
#include "trainer/hf/convert.h"

namespace gdn::trainer::hf {

namespace {

// Which of the spellings of these architectures the files use.
Naming naming_of(const WeightFiles& files) {
  Naming naming{.model_type = model_type_of(files.folder())};
  require_known_model_type(naming.model_type);
  const std::string nested = "model.language_model.";
  if (files.find(nested + "embed_tokens.weight")) naming.prefix = nested;
  naming.fused_experts = naming.fused_mtp_experts = true;
  files.for_each([&](const WeightFiles::Tensor& t) { // "<...>.mlp.experts.17.down_proj.weight"
    const std::string& name = t.info->name;
    if (name.find(".mlp.experts.") == std::string::npos || !name.ends_with(".down_proj.weight")) return;
    (name.starts_with("mtp.") ? naming.fused_mtp_experts : naming.fused_experts) = false;
  });
  return naming;
}

// Enough names to see the pattern.
std::string first_few(const std::vector<std::string>& names) {
  constexpr size_t kShown = 5;
  std::vector<std::string> shown(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(std::min(names.size(), kShown)));
  std::string text = fmt::format("{}", fmt::join(shown, ", "));
  return names.size() > kShown ? fmt::format("{} and {} more", text, names.size() - kShown) : text;
}

std::string text_of(const std::vector<std::int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

} // namespace

std::string model_type_of(const std::filesystem::path& folder) {
  const std::filesystem::path file = folder / kConfigFile;
  const config::Node root = config::parse_json(config::read_text_file(file), file.string());
  const config::Node* text = root.find("text_config");
  const config::Node* type = (text ? *text : root).find("model_type");
  if (!type) type = root.find("model_type");
  if (!type) root.fail("missing key model_type");
  return config::as_string(*type);
}

Checkpoint::Checkpoint(const std::filesystem::path& folder, const config::Model& model,
                       const model::ParameterTable& table)
    : files_(folder), naming_([&] {
        Naming naming = naming_of(files_);
        naming.stored_tied_head = model.tied_embeddings && files_.find("lm_head.weight");
        return naming;
      }()),
      tensors_(map_tensors(table, model, naming_)), placement_(tensors_) {
  const bool has_mtp = std::any_of(table.parameters.begin(), table.parameters.end(),
                                   [](const model::Parameter& p) { return p.part == model::Part::Mtp; });
  std::unordered_set<std::string> expected;
  std::vector<std::string> missing, unknown;
  for (const MappedTensor& t : tensors_) {
    expected.insert(t.name);
    if (!files_.find(t.name)) missing.push_back(t.name);
  }
  files_.for_each([&](const WeightFiles::Tensor& t) {
    const std::string& name = t.info->name;
    if (expected.contains(name)) return;
    const bool other_part = name.starts_with("model.visual.") || (name.starts_with("mtp.") && !has_mtp);
    (other_part ? not_read_ : unknown).push_back(name);
  });
  if (!missing.empty() || !unknown.empty()) {
    std::vector<std::string> what;
    if (!missing.empty()) what.push_back(fmt::format("{} missing ({})", missing.size(), first_few(missing)));
    if (!unknown.empty()) what.push_back(fmt::format("{} unknown ({})", unknown.size(), first_few(unknown)));
    throw Error(ErrorCode::Checkpoint, fmt::format("{}: tensors are not those of the model (model_type {}): {}",
                                                   folder.string(), naming_.model_type, fmt::join(what, "; ")));
  }
  check();
}

void Checkpoint::check() const {
  for (const MappedTensor& t : tensors_) {
    const WeightFiles::Tensor stored = *files_.find(t.name);
    auto fail = [&](const std::string& message) {
      throw Error(ErrorCode::Checkpoint, fmt::format("{}: tensor '{}': {}", stored.file->path().string(), t.name, message));
    };
    if (stored.info->shape != t.shape)
      fail(fmt::format("shape {}, the model has {}", text_of(stored.info->shape), text_of(t.shape)));
    if (stored.info->dtype != DType::BF16 && stored.info->dtype != DType::FP32)
      fail(fmt::format("dtype {}; weights are read in BF16 or F32", safetensors_name(stored.info->dtype)));
    if (!t.copy) continue;
    const Placement::Run original = placement_.runs(*t.pieces.front().parameter).front();
    const auto first = files_.find(tensors_[original.tensor].name)->data(), second = stored.data();
    if (!std::equal(first.begin(), first.end(), second.begin(), second.end()))
      fail(fmt::format("differs from '{}', which it is tied to", tensors_[original.tensor].name));
  }
}

void Checkpoint::read(const model::Parameter& parameter, std::int64_t first, std::int64_t count, DType dtype,
                      std::byte* out) const {
  const Bytes size = size_of(dtype);
  std::memset(out, 0, static_cast<size_t>(count * size));
  for (const Placement::Run& run : placement_.runs(parameter)) {
    const std::int64_t begin = std::max(first, run.first), end = std::min(first + count, run.first + run.count);
    if (run.copy || begin >= end) continue;
    const WeightFiles::Tensor stored = *files_.find(tensors_[run.tensor].name);
    const std::int64_t from = run.tensor_first + (begin - run.first);
    convert(stored.info->dtype, stored.data().data() + from * size_of(stored.info->dtype), dtype,
            out + (begin - first) * size, end - begin);
  }
}

std::vector<float> Checkpoint::read(const model::Parameter& parameter) const {
  std::vector<float> values(static_cast<size_t>(parameter.elements()));
  read(parameter, 0, parameter.elements(), DType::FP32, std::as_writable_bytes(std::span(values)).data());
  return values;
}

} // namespace gdn::trainer::hf
