#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "core/units.h"
#include "trainer/atomic_file.h"
#include "trainer/mapped_file.h"

// The safetensors format (huggingface/safetensors, "Format"): 8 bytes of little-endian header length,
// a JSON object {"name": {"dtype", "shape", "data_offsets"}, "__metadata__": {...}}, the data.
// A file comes from anywhere, so nothing in it is believed before it was checked.
namespace gdn::trainer {

struct TensorInfo {
  std::string name;
  DType dtype = DType::FP32;
  std::vector<std::int64_t> shape = {}; // row-major; empty: a scalar
  Bytes offset = 0;                     // of its first byte in the file; set by reader and writer

  std::int64_t elements() const;
  Bytes bytes() const { return elements() * size_of(dtype); }
};

using Metadata = std::vector<std::pair<std::string, std::string>>; // in file order

struct SafetensorsHeader {
  Metadata metadata = {};
  std::vector<TensorInfo> tensors = {}; // in the order of their data
};

// Checks the start of a file and every claim it makes about the rest: header length, JSON, names,
// dtypes, shapes, offsets. Tensors must cover the data exactly: no overlap, no gap, nothing behind.
// `content` is the whole file. Error{Checkpoint} naming file, tensor, what was found and expected.
SafetensorsHeader parse_safetensors(std::string_view content, const std::string& file);

class SafetensorsFile {
public:
  // Error{Io}: no such file; Error{Checkpoint}: not a sound safetensors file.
  explicit SafetensorsFile(std::filesystem::path path);

  const std::filesystem::path& path() const { return path_; }
  const std::vector<TensorInfo>& tensors() const { return header_.tensors; }
  const Metadata& metadata() const { return header_.metadata; }

  const TensorInfo* find(const std::string& name) const; // nullptr when absent
  // Error{Checkpoint} naming the file, with the nearest spelling.
  const TensorInfo& at(const std::string& name) const;
  // The bytes of one of tensors(); not aligned to anything.
  std::span<const std::byte> data(const TensorInfo& tensor) const;

private:
  std::filesystem::path path_;
  MappedFile file_;
  SafetensorsHeader header_;
  std::unordered_map<std::string, size_t> index_ = {};
};

// Writes one file. Tensors, their order and the metadata are known first; their data may come in any
// order and in pieces; commit() puts the file in its place (see AtomicFile). The bytes of the file
// depend on nothing else.
class SafetensorsWriter {
public:
  // Error{Io} naming path and reason; Error{Checkpoint}: a name twice, or a dtype without a name in
  // the format.
  SafetensorsWriter(std::filesystem::path path, std::vector<TensorInfo> tensors, Metadata metadata = {});

  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  // Bytes [first, first + bytes.size()) of tensors()[tensor], each byte once.
  void write(size_t tensor, Bytes first, std::span<const std::byte> bytes);
  // Error{Internal} if a tensor was not written whole; Error{Io}.
  void commit();

private:
  std::vector<TensorInfo> tensors_;
  std::vector<Bytes> missing_ = {}; // bytes of each tensor still to come
  AtomicFile file_;
};

// The format's name of a dtype ("BF16"); empty for one that it has not.
std::string_view safetensors_name(DType dtype);

} // namespace gdn::trainer
