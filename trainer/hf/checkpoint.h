#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "config/model.h"
#include "core/dtype.h"
#include "model/parameters.h"
#include "trainer/hf/layout.h"
#include "trainer/hf/weight_files.h"

namespace gdn::trainer::hf {

// The folder of a Hugging Face checkpoint, read as parameters of a table. Opening it checks that
// every tensor is there, with the right shape, in BF16 or FP32, and that nothing else is.
class Checkpoint {
public:
  // `model` and `table` must outlive it. Error{Checkpoint} naming folder, file and tensors.
  Checkpoint(const std::filesystem::path& folder, const config::Model& model, const model::ParameterTable& table);

  // Elements [first, first + count) of the parameter as `dtype` (BF16 or FP32) to `out`. Rows of a
  // padded vocabulary that the checkpoint has not are zeros.
  void read(const model::Parameter& parameter, std::int64_t first, std::int64_t count, DType dtype,
            std::byte* out) const;
  // The whole parameter, in fp32.
  std::vector<float> read(const model::Parameter& parameter) const;

  const WeightFiles& files() const { return files_; }
  const Naming& naming() const { return naming_; }
  const std::vector<MappedTensor>& tensors() const { return tensors_; }
  const Placement& placement() const { return placement_; }
  // Tensors of parts that the table has not: the vision tower, MTP layers that are not trained.
  const std::vector<std::string>& not_read() const { return not_read_; }

private:
  void check() const;

  WeightFiles files_;
  Naming naming_;
  std::vector<MappedTensor> tensors_;
  Placement placement_;
  std::vector<std::string> not_read_ = {};
};

// The model_type of a folder's config.json, that of the text model where it nests one.
std::string model_type_of(const std::filesystem::path& folder);

} // namespace gdn::trainer::hf
