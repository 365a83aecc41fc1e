#pragma once
#include <cstdint>
#include <random>
#include <string>
#include <string_view>

#include "core/error.h"
#include "trainer/safetensors.h"

// Random damage to a safetensors file: what a parser must survive.
namespace gdn::test {

inline std::string mutate(std::string bytes, std::mt19937_64& random) {
  static constexpr std::string_view kPieces[] = {
      "{", "}", "[", "]", ",", ":", "\"", "\\u0000", "-1", "-0", "1e300", "0.5", "null", "true",
      "9223372036854775807", "9223372036854775808", "18446744073709551616", "4611686018427387904",
      "\"dtype\":\"F32\",", "\"shape\":[],", "\"data_offsets\":[0,0],", "\"__metadata__\":{},", "\xff\xfe", "[[[[", "{\"a\":"};
  auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  const size_t edits = 1 + below(4);
  for (size_t i = 0; i < edits && !bytes.empty(); ++i) {
    const size_t at = below(bytes.size());
    switch (below(6)) {
    case 0: bytes[at] = static_cast<char>(random()); break;
    case 1: bytes.erase(at, 1 + below(16)); break;
    case 2: bytes.insert(at, kPieces[below(std::size(kPieces))]); break;
    case 3: bytes.resize(at); break;
    case 4: bytes.insert(at, bytes.substr(below(bytes.size()), 1 + below(32))); break;
    default: bytes[below(std::min<size_t>(8, bytes.size()))] ^= static_cast<char>(1 << below(8)); break;
    }
  }
  return bytes;
}

// Parses; an accepted file must keep the promises that every reader relies on. Returns whether it
// was accepted; anything but Error{Checkpoint} escapes.
inline bool survives(const std::string& bytes) {
  try {
    const trainer::SafetensorsHeader header = trainer::parse_safetensors(bytes, "mutated");
    Bytes next = header.tensors.empty() ? static_cast<Bytes>(bytes.size()) : header.tensors.front().offset;
    for (const trainer::TensorInfo& t : header.tensors) {
      if (t.offset != next) throw Error(ErrorCode::Internal, "accepted a gap or an overlap at " + t.name);
      next += t.bytes();
    }
    if (next != static_cast<Bytes>(bytes.size())) throw Error(ErrorCode::Internal, "accepted a wrong end");
    return true;
  } catch (const Error& e) {
    if (e.code() != ErrorCode::Checkpoint) throw;
    return false;
  }
}

} // namespace gdn::test
