#include <cstdint>
#include <string>
#include <unordered_set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "trainer/safetensors.h"

namespace gdn::trainer {

namespace {

std::string quoted(const std::string& text) { return nlohmann::json(text).dump(); }

void check(const std::vector<TensorInfo>& tensors, const std::filesystem::path& path) {
  std::unordered_set<std::string> names{"__metadata__"};
  for (const TensorInfo& t : tensors) {
    if (!names.insert(t.name).second)
      throw Error(ErrorCode::Checkpoint, fmt::format("{}: two tensors are called '{}'", path.string(), t.name));
    if (safetensors_name(t.dtype).empty())
      throw Error(ErrorCode::Checkpoint, fmt::format("{}: tensor '{}': safetensors has no dtype {}", path.string(),
                                                     t.name, name_of(t.dtype)));
  }
}

// Compact JSON, padded with spaces so that the data starts at a multiple of 8: what the format's own
// library writes.
std::string header_text(const std::vector<TensorInfo>& tensors, const Metadata& metadata) {
  std::vector<std::string> entries;
  if (!metadata.empty()) {
    std::vector<std::string> pairs;
    for (const auto& [key, value] : metadata) pairs.push_back(fmt::format("{}:{}", quoted(key), quoted(value)));
    entries.push_back(fmt::format("\"__metadata__\":{{{}}}", fmt::join(pairs, ",")));
  }
  Bytes begin = 0;
  for (const TensorInfo& t : tensors) {
    const Bytes end = checked_add(begin, t.bytes());
    entries.push_back(fmt::format(R"({}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", quoted(t.name),
                                  safetensors_name(t.dtype), fmt::join(t.shape, ","), begin, end));
    begin = end;
  }
  std::string text = fmt::format("{{{}}}", fmt::join(entries, ","));
  text.resize(static_cast<size_t>(round_up(static_cast<std::int64_t>(text.size()), 8)), ' ');
  return text;
}

} // namespace

SafetensorsWriter::SafetensorsWriter(std::filesystem::path path, std::vector<TensorInfo> tensors, Metadata metadata)
    : tensors_(std::move(tensors)), file_((check(tensors_, path), std::move(path))) {
  const std::string text = header_text(tensors_, metadata);
  const std::uint64_t length = text.size();
  file_.write(0, std::as_bytes(std::span(&length, 1)));
  file_.write(8, std::as_bytes(std::span(text)));
  Bytes next = 8 + static_cast<Bytes>(length);
  for (TensorInfo& t : tensors_) {
    t.offset = next;
    next += t.bytes();
    missing_.push_back(t.bytes());
  }
}

void SafetensorsWriter::write(size_t tensor, Bytes first, std::span<const std::byte> bytes) {
  const TensorInfo& t = tensors_.at(tensor);
  const Bytes count = static_cast<Bytes>(bytes.size());
  if (first < 0 || first > t.bytes() - count || count > missing_[tensor])
    throw Error(ErrorCode::Internal, fmt::format("{}: tensor '{}': bytes [{}, {}) written, it has {} and lacks {}",
                                                 file_.path().string(), t.name, first, first + count, t.bytes(),
                                                 missing_[tensor]));
  file_.write(t.offset + first, bytes);
  missing_[tensor] -= count;
}

void SafetensorsWriter::commit() {
  for (size_t i = 0; i < tensors_.size(); ++i)
    if (missing_[i] != 0)
      throw Error(ErrorCode::Internal, fmt::format("{}: {} of {} bytes of tensor '{}' were never written",
                                                   file_.path().string(), missing_[i], tensors_[i].bytes(),
                                                   tensors_[i].name));
  file_.commit();
}

} // namespace gdn::trainer
