#pragma once
#include <filesystem>
#include <map>
#include <memory>
#include <string_view>
#include <vector>

#include "trainer/checkpoint/manifest.h"
#include "trainer/safetensors.h"

namespace gdn::trainer::checkpoint {

// A written checkpoint, read back at any parallelism. Nothing in it is believed before it was checked.
class Reader {
public:
  // Opens the manifest. Error{Checkpoint} when the folder is none, has no manifest (writing it was
  // interrupted) or one that is not sound.
  explicit Reader(std::filesystem::path folder);

  const std::filesystem::path& folder() const { return folder_; }
  const Manifest& manifest() const { return manifest_; }

  // Reads every file. Error{Checkpoint} naming the file and the tensor that is missing, cut short, of
  // another size or changed.
  void verify();

  // The elements of `shard` of a tensor of `shape`, in the shard's order, whoever wrote which part.
  // Rows past those of the saved tensor (a vocabulary padded further) are zeros. Error{Checkpoint} when
  // the checkpoint lacks the tensor or any part of it, or a piece is damaged.
  std::vector<float> read(std::string_view state, std::string_view name, const Shape& shape, const Shard& shard);

private:
  struct Source { // one piece and where its elements lie in the tensor
    size_t file = 0;
    const PieceEntry* piece = nullptr;
    std::vector<Extent> extents = {};
    bool verified = false;
  };
  const SafetensorsFile& file(size_t index);
  std::span<const std::byte> data(Source& source); // verified

  std::filesystem::path folder_;
  Manifest manifest_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;       // opened on demand
  std::map<std::string, std::vector<Source>, std::less<>> sources_; // by "STATE.NAME"
};

} // namespace gdn::trainer::checkpoint
