#pragma once
#include <filesystem>
#include <optional>
#include <string>

#include "config/model.h"
#include "core/dtype.h"
#include "trainer/hf/checkpoint.h"
#include "trainer/hf/export.h"
#include "trainer/parameters.h"

namespace gdn::trainer::hf {

// Every weight of a checkpoint into the parameters, whose table it was opened with. Masters take the
// stored values; what ops read is rounded to the run's dtype.
void load(const Checkpoint& checkpoint, Parameters& parameters);

// Every weight as its master holds it, into an export of the same table; the caller commits.
void store(Parameters& parameters, Export& out);

// The Hugging Face side of a training run: the folder it starts from (--hf) and the folder that its
// weights are left in (--export-hf); either may be empty.
class RunWeights {
public:
  // Before any time is spent: Error{Checkpoint} if `from` holds weights of another model, or `to` is
  // there already. `model` must outlive it.
  RunWeights(const config::Model& model, const std::string& from, const std::string& to);

  void load_into(Parameters& parameters);
  // Like the checkpoint it came from, tensor by tensor; else as the text model in `dtype`, under the
  // newest model type that can say it.
  void store_from(Parameters& parameters, DType dtype);

  // What is not read from `from` and copied to `to` as it is; empty if there is nothing.
  std::string note() const;

private:
  const config::Model& model_;
  std::filesystem::path from_, to_;
  std::optional<Checkpoint> checkpoint_ = {};
};

} // namespace gdn::trainer::hf
