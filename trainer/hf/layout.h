#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "config/model.h"
#include "model/parameters.h"

// Where every weight of a Hugging Face checkpoint (huggingface/transformers, qwen3_next and qwen3_5)
// lies in the parameter table. A parameter holds what the checkpoint stores, value by value; only
// rows change their places, so loading and exporting are the same copies in two directions.
namespace gdn::trainer::hf {

// What differs between checkpoints of these architectures.
struct Naming {
  std::string model_type = "qwen3_5_text";
  std::string prefix = "model.";   // "model.language_model." where the model has a vision tower
  bool fused_experts = true;       // one gate_up_proj and one down_proj for all, or files per expert
  bool fused_mtp_experts = true;   // the same of the MTP layer, which can differ
  bool stored_tied_head = false;   // lm_head.weight is there although it is the embedding

  // Qwen3-Next interleaves the GDN projection per key head; later ones keep four flat tensors.
  bool interleaved_projection() const { return model_type == "qwen3_next"; }
};

// The model types that are read and written. Throws Error{Checkpoint} naming `model_type` and them.
void require_known_model_type(const std::string& model_type);

struct Piece { // consecutive elements of a parameter
  const model::Parameter* parameter = nullptr;
  std::int64_t first = 0, count = 0;
};

struct MappedTensor {
  std::string name;
  std::vector<std::int64_t> shape;
  std::vector<Piece> pieces; // one after the other they are the tensor
  bool copy = false;         // an earlier tensor holds the same elements (a stored tied head)
};

// Every tensor that holds parameters of the table, in the table's order; the vision tower's are left
// out. Parameters with a padded vocabulary are longer than their tensor. `table` must outlive it.
// Error{Checkpoint} naming a parameter that this layout has no place for.
std::vector<MappedTensor> map_tensors(const model::ParameterTable& table, const config::Model& model,
                                      const Naming& naming);

// The same seen from the parameters: which tensors hold the elements of one.
class Placement {
public:
  explicit Placement(const std::vector<MappedTensor>& tensors);

  struct Run { // consecutive elements of a parameter that are consecutive in a tensor, too
    std::int64_t first = 0, count = 0; // of the parameter
    size_t tensor = 0;                 // into the tensors given
    std::int64_t tensor_first = 0;
    bool copy = false;
  };
  // In ascending order of `first`. Error{Checkpoint} if no tensor holds the parameter.
  const std::vector<Run>& runs(const model::Parameter& parameter) const;

private:
  std::unordered_map<std::string, std::vector<Run>> runs_ = {};
};

} // namespace gdn::trainer::hf
