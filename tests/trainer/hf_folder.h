#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "tests/temporary_folder.h"

// Tiny checkpoints in every layout that people have on disk, written tensor by tensor from a list of
// names and shapes of their own: nothing here comes from the code that reads them.
namespace gdn::test {

struct HfFolder {
  std::string type = "qwen3_5_moe_text";
  bool vision = false, mtp = false, tied = false, stored_head = false; // stored_head: although tied
  bool per_expert = false, mtp_per_expert = false;
  bool sharded = false;      // two files and an index
  DType dtype = DType::BF16; // A_log stays FP32, as Qwen3.5 stores it

  static constexpr int kHidden = 8, kVocab = 12, kLayers = 2, kFfn = 6, kExpertFfn = 8, kExperts = 3;
  static constexpr int kKeyHeads = 2, kValueHeads = 6, kKeyDim = 3, kValueDim = 5; // r = 3
  static constexpr int kHeads = 4, kKvHeads = 2, kHeadDim = 8;

  bool next() const { return type == "qwen3_next"; }
  bool moe() const { return next() || type.starts_with("qwen3_5_moe"); }
  std::string prefix() const { return vision ? "model.language_model." : "model."; }

  struct Named {
    std::string name;
    std::vector<std::int64_t> shape;
  };
  std::vector<Named> tensors() const;

  // A value of its own for every element, exact in BF16; a tied head repeats the embedding.
  float value(const std::string& name, std::int64_t i) const;

  std::string config() const; // the text of config.json

  void write(const std::filesystem::path& folder) const { write(folder, tensors()); }
  // `list` instead of tensors(): for damaged checkpoints.
  void write(const std::filesystem::path& folder, const std::vector<Named>& list) const;

private:
  static void attention(std::vector<Named>& t, const std::string& at);
  void mlp(std::vector<Named>& t, const std::string& at, bool each) const;

  void write_file(const std::filesystem::path& path, const std::vector<Named>& list) const;
};

} // namespace gdn::test
