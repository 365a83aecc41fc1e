#pragma once
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "trainer/safetensors.h"

namespace gdn::trainer::hf {

inline constexpr const char* kSingleFile = "model.safetensors";
inline constexpr const char* kIndexFile = "model.safetensors.index.json";
inline constexpr const char* kConfigFile = "config.json";

// The weights of a checkpoint folder as one set of tensors: model.safetensors, or the files that
// model.safetensors.index.json names.
class WeightFiles {
public:
  // Error{Checkpoint}: neither is there, the index is damaged, or index and files disagree; the
  // message names file and tensor.
  explicit WeightFiles(std::filesystem::path folder);

  struct Tensor {
    const SafetensorsFile* file = nullptr;
    const TensorInfo* info = nullptr;
    std::span<const std::byte> data() const { return file->data(*info); }
  };
  std::optional<Tensor> find(const std::string& name) const;
  // Calls `visit` for every tensor, file by file, in the order of their data.
  void for_each(const std::function<void(const Tensor&)>& visit) const;

  const std::filesystem::path& folder() const { return folder_; }
  const std::vector<SafetensorsFile>& files() const { return files_; } // sorted by name
  bool has_index() const { return has_index_; }

private:
  void read_index();

  std::filesystem::path folder_;
  bool has_index_ = false;
  std::vector<SafetensorsFile> files_ = {};
  std::unordered_map<std::string, size_t> file_of_ = {}; // tensor name -> into files_
};

} // namespace gdn::trainer::hf
