#include "trainer/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <unordered_set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"

namespace gdn::trainer {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

namespace {

constexpr std::int64_t kMaxHeader = 100'000'000; // the format's own limit

struct DTypeName {
  DType dtype;
  std::string_view name;
};
constexpr std::array<DTypeName, 8> kDTypes{{{DType::BF16, "BF16"},
                                            {DType::FP16, "F16"},
                                            {DType::FP32, "F32"},
                                            {DType::FP64, "F64"},
                                            {DType::FP8, "F8_E4M3"},
                                            {DType::Int64, "I64"},
                                            {DType::Int32, "I32"},
                                            {DType::Bool, "BOOL"}}};

// Names come from the file: no control characters on the user's terminal, no page-long messages.
std::string printable(const std::string& name) {
  std::string out = name.substr(0, 200);
  for (char& c : out)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  return name.size() > 200 ? out + "..." : out;
}

[[noreturn]] void fail(const std::string& file, const std::string& message) {
  throw Error(ErrorCode::Checkpoint, fmt::format("{}: {}", file, message));
}
[[noreturn]] void fail(const std::string& file, const std::string& tensor, const std::string& message) {
  fail(file, fmt::format("tensor '{}': {}", printable(tensor), message));
}

struct Claim { // a tensor as the header describes it
  std::string name;
  std::optional<DType> dtype = {};
  std::optional<std::vector<std::int64_t>> shape = {}, offsets = {};
};

// Receives the header's JSON piece by piece, because a document object would silently keep one of two
// equal names and turn integers that are too large into floating point.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
public:
  explicit HeaderReader(const std::string& file) : file_(file) {}

  Metadata metadata = {};
  std::vector<Claim> claims = {};

  bool start_object(std::size_t) override {
    switch (in_) {
    case In::Document: in_ = In::Root; return true;
    case In::Root:
      in_ = key_ == "__metadata__" ? In::Metadata : In::Tensor;
      if (in_ == In::Tensor) claims.push_back({key_});
      return true;
    default: unexpected("an object");
    }
  }
  bool key(std::string& name) override {
    key_ = name;
    if (in_ == In::Root && !names_.insert(name).second) fail(file_, name, "appears twice in the header");
    if (in_ == In::Metadata && !metadata_names_.insert(name).second)
      fail(file_, fmt::format("metadata '{}' appears twice", printable(name)));
    if (in_ == In::Tensor) {
      const Claim& c = claims.back();
      const bool known = name == "dtype" || name == "shape" || name == "data_offsets";
      if (!known)
        fail(file_, c.name, fmt::format("unknown field '{}'; known: dtype, shape, data_offsets", printable(name)));
      if (name == "dtype" ? c.dtype.has_value() : name == "shape" ? c.shape.has_value() : c.offsets.has_value())
        fail(file_, c.name, fmt::format("field '{}' appears twice", name));
    }
    return true;
  }
  bool end_object() override {
    if (in_ == In::Tensor) {
      const Claim& c = claims.back();
      const char* absent = !c.dtype ? "dtype" : !c.shape ? "shape" : !c.offsets ? "data_offsets" : nullptr;
      if (absent) fail(file_, c.name, fmt::format("field '{}' is missing", absent));
    }
    in_ = in_ == In::Root ? In::Done : In::Root;
    return true;
  }
  bool start_array(std::size_t) override {
    if (in_ != In::Tensor || key_ == "dtype") unexpected("a list");
    (key_ == "shape" ? claims.back().shape : claims.back().offsets).emplace();
    in_ = In::List;
    return true;
  }
  bool end_array() override {
    in_ = In::Tensor;
    return true;
  }
  bool string(std::string& text) override {
    if (in_ == In::Metadata) {
      metadata.emplace_back(key_, text);
      return true;
    }
    if (in_ != In::Tensor || key_ != "dtype") unexpected(fmt::format("the text \"{}\"", printable(text)));
    std::vector<std::string_view> known;
    for (const DTypeName& d : kDTypes) {
      if (d.name == text) claims.back().dtype = d.dtype;
      known.push_back(d.name);
    }
    if (!claims.back().dtype)
      fail(file_, claims.back().name,
           fmt::format("dtype '{}' is not read; known: {}", printable(text), fmt::join(known, ", ")));
    return true;
  }
  bool number_unsigned(std::uint64_t value) override {
    if (in_ != In::List) unexpected(fmt::format("the number {}", value));
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
      unexpected(fmt::format("the number {}", value));
    (key_ == "shape" ? claims.back().shape : claims.back().offsets)->push_back(static_cast<std::int64_t>(value));
    return true;
  }
  bool number_integer(std::int64_t value) override { unexpected(fmt::format("the number {}", value)); }
  bool number_float(double, const std::string& text) override {
    unexpected(fmt::format("the number {}", printable(text)));
  }
  bool null() override { unexpected("null"); }
  bool boolean(bool value) override { unexpected(value ? "true" : "false"); }
  bool binary(nlohmann::json::binary_t&) override { unexpected("binary data"); }
  bool parse_error(std::size_t, const std::string&, const nlohmann::json::exception& error) override {
    const std::string where = claims.empty() ? "" : fmt::format(" (in or after tensor '{}')", printable(claims.back().name));
    fail(file_, fmt::format("the header is not JSON{}: {}", where, printable(error.what())));
  }

private:
  enum class In { Document, Root, Metadata, Tensor, List, Done };

  [[noreturn]] void unexpected(const std::string& what) const {
    switch (in_) {
    case In::Document:
    case In::Done: fail(file_, fmt::format("the header is {}, expected a JSON object", what));
    case In::Root:
      fail(file_, key_, fmt::format("{} instead of an object with dtype, shape and data_offsets", what));
    case In::Metadata: fail(file_, fmt::format("metadata '{}' is {}, expected text", printable(key_), what));
    case In::Tensor:
    case In::List: break;
    }
    const char* expected = key_ == "dtype" ? "text" : "a list of whole numbers from 0 to 2^63-1";
    fail(file_, claims.back().name, fmt::format("{} is or holds {}, expected {}", key_, what, expected));
  }

  const std::string& file_;
  In in_ = In::Document;
  std::string key_ = {};
  std::unordered_set<std::string> names_ = {}, metadata_names_ = {};
};

// Bytes of a tensor of this shape, or nothing when they do not fit 64 bits.
std::optional<Bytes> bytes_of(DType dtype, const std::vector<std::int64_t>& shape) {
  Bytes bytes = size_of(dtype);
  for (std::int64_t n : shape)
    if (__builtin_mul_overflow(bytes, n, &bytes)) return {};
  return bytes;
}

TensorInfo check(Claim claim, Bytes data_begin, Bytes data_bytes, const std::string& file) {
  const std::vector<std::int64_t>& at = *claim.offsets;
  if (at.size() != 2)
    fail(file, claim.name, fmt::format("data_offsets has {} numbers, expected [begin, end]", at.size()));
  if (at[0] > at[1] || at[1] > data_bytes)
    fail(file, claim.name, fmt::format("data_offsets [{}, {}] lie outside the {} data bytes of the file{}", at[0], at[1],
                                       data_bytes, at[1] > data_bytes ? " (is it truncated?)" : ""));
  const std::optional<Bytes> bytes = bytes_of(*claim.dtype, *claim.shape);
  if (bytes != at[1] - at[0])
    fail(file, claim.name,
         fmt::format("{} [{}] takes {} bytes, data_offsets [{}, {}] hold {}", safetensors_name(*claim.dtype),
                     fmt::join(*claim.shape, ", "), bytes ? std::to_string(*bytes) : "more than 2^63", at[0], at[1],
                     at[1] - at[0]));
  return {std::move(claim.name), *claim.dtype, std::move(*claim.shape), data_begin + at[0]};
}

} // namespace

std::int64_t TensorInfo::elements() const {
  std::int64_t n = 1;
  for (std::int64_t size : shape) n = checked_mul(n, size);
  return n;
}

std::string_view safetensors_name(DType dtype) {
  for (const DTypeName& d : kDTypes)
    if (d.dtype == dtype) return d.name;
  return {};
}

SafetensorsHeader parse_safetensors(std::string_view content, const std::string& file) {
  if (content.size() < 8)
    fail(file, fmt::format("{} bytes is too short for a safetensors file (8 bytes of header length)", content.size()));
  std::uint64_t length = 0;
  std::memcpy(&length, content.data(), sizeof length);
  if (length > kMaxHeader)
    fail(file, fmt::format("header length {} is above the format's limit of {}: not a safetensors file", length,
                           kMaxHeader));
  if (length > content.size() - 8)
    fail(file, fmt::format("header length {} is beyond the end of the file ({} bytes; is it truncated?)", length,
                           content.size()));
  const std::string_view json = content.substr(8, length);
  if (json.empty() || json.front() != '{') fail(file, "the header does not begin with '{'");

  HeaderReader reader(file);
  nlohmann::json::sax_parse(json.begin(), json.end(), &reader);

  const Bytes begin = 8 + static_cast<Bytes>(length), end = static_cast<Bytes>(content.size());
  SafetensorsHeader header{.metadata = std::move(reader.metadata)};
  for (Claim& claim : reader.claims) header.tensors.push_back(check(std::move(claim), begin, end - begin, file));

  // An empty tensor may lie on the border of two others; it comes before the one that starts there.
  std::vector<TensorInfo>& tensors = header.tensors;
  std::stable_sort(tensors.begin(), tensors.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return std::pair(a.offset, a.bytes()) < std::pair(b.offset, b.bytes());
  });
  Bytes next = begin;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorInfo& t = tensors[i];
    if (t.offset < next)
      fail(file, t.name, fmt::format("overlaps tensor '{}' by {} bytes", printable(tensors[i - 1].name), next - t.offset));
    if (t.offset > next) fail(file, t.name, fmt::format("{} bytes before it belong to no tensor", t.offset - next));
    next += t.bytes();
  }
  if (next != end) fail(file, fmt::format("the last {} bytes belong to no tensor", end - next));
  return header;
}

// --------------------------------------------------------------------------------- reading ----

SafetensorsFile::SafetensorsFile(std::filesystem::path path)
    : path_(std::move(path)), file_(path_), header_(parse_safetensors(file_.content(), path_.string())) {
  for (size_t i = 0; i < header_.tensors.size(); ++i) index_.emplace(header_.tensors[i].name, i);
}

const TensorInfo* SafetensorsFile::find(const std::string& name) const {
  auto it = index_.find(name);
  return it == index_.end() ? nullptr : &header_.tensors[it->second];
}

const TensorInfo& SafetensorsFile::at(const std::string& name) const {
  if (const TensorInfo* t = find(name)) return *t;
  std::vector<std::string> names;
  for (const TensorInfo& t : header_.tensors) names.push_back(t.name);
  fail(path_.string(), fmt::format("no tensor '{}'{}", name, did_you_mean(name, names)));
}

std::span<const std::byte> SafetensorsFile::data(const TensorInfo& tensor) const {
  return std::as_bytes(std::span(file_.content()))
      .subspan(static_cast<size_t>(tensor.offset), static_cast<size_t>(tensor.bytes()));
}

} // namespace gdn::trainer
