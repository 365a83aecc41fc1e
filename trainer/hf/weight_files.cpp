#include "trainer/hf/weight_files.h"

#include <map>
#include <set>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "core/error.h"

namespace gdn::trainer::hf {

namespace fs = std::filesystem;

namespace {

[[noreturn]] void fail(const fs::path& file, const std::string& message) {
  throw Error(ErrorCode::Checkpoint, fmt::format("{}: {}", file.string(), message));
}

// tensor name -> file name, from {"metadata": {...}, "weight_map": {"name": "file"}}.
std::map<std::string, std::string> read_weight_map(const fs::path& index) {
  using json = nlohmann::json;
  const MappedFile file(index);
  std::set<std::string> names; // a document would keep the last of two equal keys
  auto check = [&](int depth, json::parse_event_t event, json& value) {
    if (depth > 3) fail(index, "is nested deeper than an index is");
    if (depth == 2 && event == json::parse_event_t::key && !names.insert(value.get<std::string>()).second)
      fail(index, fmt::format("'{}' appears twice", value.get<std::string>()));
    return true;
  };
  std::map<std::string, std::string> files;
  try {
    const json root = json::parse(file.content().begin(), file.content().end(), check);
    if (!root.is_object() || !root.contains("weight_map") || !root["weight_map"].is_object())
      fail(index, "has no \"weight_map\"");
    for (const auto& [tensor, name] : root["weight_map"].items()) {
      if (!name.is_string()) fail(index, fmt::format("the file of tensor '{}' is not text", tensor));
      const fs::path path = name.get<std::string>();
      if (path.filename() != path || path.extension() != ".safetensors") // nothing outside this folder
        fail(index, fmt::format("tensor '{}' lies in '{}', which is not the plain name of a .safetensors file", tensor,
                                path.string()));
      files.emplace(tensor, path.string());
    }
  } catch (const json::exception& e) {
    fail(index, fmt::format("not an index: {}", e.what()));
  }
  return files;
}

} // namespace

WeightFiles::WeightFiles(fs::path folder) : folder_(std::move(folder)) {
  if (!fs::is_directory(folder_)) fail(folder_, "no such folder");
  has_index_ = fs::exists(folder_ / kIndexFile);
  if (has_index_) {
    read_index();
    return;
  }
  if (!fs::exists(folder_ / kSingleFile))
    throw Error(ErrorCode::Checkpoint, fmt::format("{}: holds neither {} nor {}", folder_.string(), kSingleFile, kIndexFile),
                "weights are read from safetensors files only, not from pickled .bin or .pt files");
  files_.emplace_back(folder_ / kSingleFile);
  for (const TensorInfo& t : files_.front().tensors()) file_of_.emplace(t.name, 0);
}

void WeightFiles::read_index() {
  const fs::path index = folder_ / kIndexFile;
  const std::map<std::string, std::string> weight_map = read_weight_map(index);
  std::set<std::string> names;
  for (const auto& [tensor, file] : weight_map) names.insert(file);
  for (const std::string& name : names)
    if (!fs::exists(folder_ / name))
      fail(folder_ / name, fmt::format("no such file, but {} names it (an unfinished download?)", kIndexFile));
  for (const std::string& name : names) {
    const SafetensorsFile& file = files_.emplace_back(folder_ / name);
    for (const TensorInfo& t : file.tensors()) {
      auto it = weight_map.find(t.name);
      if (it == weight_map.end()) fail(file.path(), fmt::format("tensor '{}' is not in {}", t.name, kIndexFile));
      if (it->second != name)
        fail(file.path(), fmt::format("tensor '{}' should be in {} according to {}", t.name, it->second, kIndexFile));
      file_of_.emplace(t.name, files_.size() - 1);
    }
  }
  for (const auto& [tensor, file] : weight_map)
    if (!file_of_.contains(tensor)) fail(folder_ / file, fmt::format("lacks tensor '{}', which {} names", tensor, kIndexFile));
}

std::optional<WeightFiles::Tensor> WeightFiles::find(const std::string& name) const {
  auto it = file_of_.find(name);
  if (it == file_of_.end()) return {};
  const SafetensorsFile& file = files_[it->second];
  return Tensor{&file, file.find(name)};
}

void WeightFiles::for_each(const std::function<void(const Tensor&)>& visit) const {
  for (const SafetensorsFile& file : files_)
    for (const TensorInfo& t : file.tensors()) visit({&file, &t});
}

} // namespace gdn::trainer::hf
