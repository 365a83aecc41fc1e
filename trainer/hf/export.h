#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <unordered_map>
#include <vector>

#include "config/model.h"
#include "core/dtype.h"
#include "core/units.h"
#include "model/parameters.h"
#include "trainer/hf/checkpoint.h"
#include "trainer/hf/layout.h"
#include "trainer/safetensors.h"

namespace gdn::trainer::hf {

// What a checkpoint looks like that has no model to follow.
struct NewCheckpoint {
  std::string model_type; // "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"
  DType dtype = DType::BF16;          // of all weights but the gates (A_log, dt_bias), which are FP32
  Bytes max_file_bytes = 5'000'000'000; // of tensors in one file, unless one tensor is larger
};

// DIR.part, which becomes DIR in commit(): what is half written has another name, and without
// commit() nothing is left.
class StagedFolder {
public:
  // Error{Checkpoint} if DIR is there and not empty, or DIR.part is there; Error{Io}.
  explicit StagedFolder(std::filesystem::path folder);
  StagedFolder(const StagedFolder&) = delete;
  ~StagedFolder();
  // Throws the same without creating anything.
  static void require_free(const std::filesystem::path& folder);
  std::filesystem::path operator/(const std::filesystem::path& name) const { return staged_ / name; }
  void commit();

private:
  static std::filesystem::path staged(const std::filesystem::path& folder);

  std::filesystem::path folder_, staged_;
  bool committed_ = false;
};

// Writes parameters as the folder of a Hugging Face checkpoint.
class Export {
public:
  // Files, names, order, dtypes and metadata of `source`. Tensors that it did not read, and the
  // configuration and tokenizer beside them, are copied: parameters as they were give the same bytes.
  Export(const std::filesystem::path& folder, const Checkpoint& source);
  // A checkpoint of its own. Error{Checkpoint} if the architecture cannot say this model.
  Export(const std::filesystem::path& folder, const config::Model& model, const model::ParameterTable& table,
         const NewCheckpoint& what);

  // Elements [first, first + count) of a parameter from `values` (BF16 or FP32), each element once;
  // padded rows of a vocabulary are left out.
  void put(const model::Parameter& parameter, std::int64_t first, std::int64_t count, DType dtype,
           const std::byte* values);
  void put(const model::Parameter& parameter, const std::vector<float>& values); // the whole of it

  // Error{Internal} if a parameter was not put; Error{Io}.
  void commit();

private:
  struct Place {
    size_t file, tensor; // into files_ and its tensors()
  };
  void add_file(const std::string& name, std::vector<TensorInfo> tensors, const Metadata& metadata);

  std::vector<MappedTensor> tensors_;
  Placement placement_;
  StagedFolder folder_;
  std::vector<SafetensorsWriter> files_ = {};
  std::unordered_map<std::string, Place> places_ = {}; // by tensor name
};

} // namespace gdn::trainer::hf
