#include "trainer/hf/export.h"

#include <algorithm>
#include <map>
#include <utility>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "trainer/hf/config_json.h"
#include "trainer/hf/convert.h"

namespace gdn::trainer::hf {

namespace fs = std::filesystem;

namespace {

// Configuration and tokenizer: everything beside the weights that a checkpoint needs to be used.
bool goes_along(const fs::path& file) {
  const std::string extension = file.extension().string();
  return fs::is_regular_file(file) &&
         (extension == ".json" || extension == ".txt" || extension == ".jinja" || extension == ".model");
}

// As transformers writes it: sorted keys, two spaces.
std::string index_text(const std::map<std::string, std::string>& weight_map, std::int64_t parameters, Bytes bytes) {
  const nlohmann::json index{{"metadata", {{"total_parameters", parameters}, {"total_size", bytes}}},
                             {"weight_map", weight_map}};
  return index.dump(2) + "\n";
}

DType dtype_of(const MappedTensor& t, const NewCheckpoint& what) {
  return t.pieces.front().parameter->dtype == model::DTypeGroup::Gate ? DType::FP32 : what.dtype;
}

// Groups of at most `limit` bytes, in model order.
std::vector<std::vector<TensorInfo>> split(const std::vector<MappedTensor>& tensors, const NewCheckpoint& what) {
  std::vector<std::vector<TensorInfo>> files(1);
  Bytes used = 0;
  for (const MappedTensor& t : tensors) {
    TensorInfo info{t.name, dtype_of(t, what), t.shape};
    if (used + info.bytes() > what.max_file_bytes && !files.back().empty()) {
      files.emplace_back();
      used = 0;
    }
    used += info.bytes();
    files.back().push_back(std::move(info));
  }
  // The order of the format's own library inside a file: wider types first, then by name.
  for (std::vector<TensorInfo>& file : files)
    std::sort(file.begin(), file.end(), [](const TensorInfo& a, const TensorInfo& b) {
      return std::pair(-size_of(a.dtype), std::string_view(a.name)) < std::pair(-size_of(b.dtype), std::string_view(b.name));
    });
  return files;
}

} // namespace

fs::path StagedFolder::staged(const fs::path& folder) { return folder.string() + ".part"; }

void StagedFolder::require_free(const fs::path& folder) {
  std::error_code error; // what cannot be looked at cannot be created either
  if (fs::exists(folder, error) && !(fs::is_directory(folder, error) && fs::is_empty(folder, error)))
    throw Error(ErrorCode::Checkpoint, fmt::format("{}: is there already; a checkpoint is exported to a new folder", folder.string()));
  if (fs::exists(staged(folder), error))
    throw Error(ErrorCode::Checkpoint, fmt::format("{}: is there already", staged(folder).string()),
                "another export is running, or one was killed: then remove the folder");
}

StagedFolder::StagedFolder(fs::path folder) : folder_(folder.lexically_normal()) {
  if (!folder_.has_filename()) folder_ = folder_.parent_path(); // "dir/"
  staged_ = staged(folder_);
  require_free(folder_);
  std::error_code error;
  if (folder_.has_parent_path()) fs::create_directories(folder_.parent_path(), error);
  if (!error) fs::create_directory(staged_, error);
  if (error) throw Error(ErrorCode::Io, fmt::format("{}: cannot create it: {}", staged_.string(), error.message()));
}

StagedFolder::~StagedFolder() {
  std::error_code ignored;
  if (!committed_) fs::remove_all(staged_, ignored);
}

void StagedFolder::commit() {
  std::error_code error;
  fs::rename(staged_, folder_, error);
  if (error)
    throw Error(ErrorCode::Io, fmt::format("{}: cannot become {}: {}", staged_.string(), folder_.string(), error.message()));
  committed_ = true;
}

Export::Export(const fs::path& folder, const Checkpoint& source)
    : tensors_(source.tensors()), placement_(tensors_), folder_(folder) {
  for (const SafetensorsFile& file : source.files().files())
    add_file(file.path().filename().string(), file.tensors(), file.metadata());
  for (const std::string& name : source.not_read()) {
    const Place at = places_.at(name);
    files_[at.file].write(at.tensor, 0, source.files().find(name)->data());
  }
  for (const fs::directory_entry& e : fs::directory_iterator(source.files().folder()))
    if (goes_along(e.path())) write_atomically(folder_ / e.path().filename(), MappedFile(e.path()).content());
}

Export::Export(const fs::path& folder, const config::Model& model, const model::ParameterTable& table,
               const NewCheckpoint& what)
    : tensors_((require_expressible(model, what.model_type), map_tensors(table, model, {.model_type = what.model_type}))),
      placement_(tensors_), folder_(folder) {
  const std::vector<std::vector<TensorInfo>> files = split(tensors_, what);
  std::map<std::string, std::string> weight_map;
  std::int64_t parameters = 0;
  Bytes bytes = 0;
  for (size_t i = 0; i < files.size(); ++i) {
    const std::string name =
        files.size() == 1 ? kSingleFile : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, files.size());
    for (const TensorInfo& t : files[i]) {
      weight_map.emplace(t.name, name);
      parameters += t.elements();
      bytes += t.bytes();
    }
    add_file(name, files[i], {{"format", "pt"}});
  }
  if (files.size() > 1) write_atomically(folder_ / kIndexFile, index_text(weight_map, parameters, bytes));
  write_atomically(folder_ / kConfigFile, config_json(model, what.model_type, what.dtype));
}

void Export::add_file(const std::string& name, std::vector<TensorInfo> tensors, const Metadata& metadata) {
  for (size_t i = 0; i < tensors.size(); ++i) places_.emplace(tensors[i].name, Place{files_.size(), i});
  files_.emplace_back(folder_ / name, std::move(tensors), metadata);
}

void Export::put(const model::Parameter& parameter, std::int64_t first, std::int64_t count, DType dtype,
                 const std::byte* values) {
  constexpr std::int64_t kElementsAtOnce = 1 << 20;
  std::vector<std::byte> buffer;
  for (const Placement::Run& run : placement_.runs(parameter)) {
    const Place at = places_.at(tensors_[run.tensor].name);
    SafetensorsWriter& file = files_[at.file];
    const DType stored = file.tensors()[at.tensor].dtype;
    const std::int64_t end = std::min(first + count, run.first + run.count);
    for (std::int64_t i = std::max(first, run.first); i < end; i += kElementsAtOnce) {
      const std::int64_t n = std::min(kElementsAtOnce, end - i);
      buffer.resize(static_cast<size_t>(n * size_of(stored)));
      convert(dtype, values + (i - first) * size_of(dtype), stored, buffer.data(), n);
      file.write(at.tensor, (run.tensor_first + (i - run.first)) * size_of(stored), buffer);
    }
  }
}

void Export::put(const model::Parameter& parameter, const std::vector<float>& values) {
  if (static_cast<std::int64_t>(values.size()) != parameter.elements())
    throw Error(ErrorCode::Internal, fmt::format("parameter '{}' has {} elements, {} given", parameter.name,
                                                 parameter.elements(), values.size()));
  put(parameter, 0, parameter.elements(), DType::FP32, std::as_bytes(std::span(values)).data());
}

void Export::commit() {
  for (SafetensorsWriter& file : files_) file.commit();
  folder_.commit();
}

} // namespace gdn::trainer::hf
