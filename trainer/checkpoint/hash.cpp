#include "trainer/checkpoint/hash.h"

#include <algorithm>
#include <cstring>

#include <fmt/core.h>

namespace gdn::trainer::checkpoint {

// FNV-1a over words, the high half folded down after each so that every bit reaches the low ones.
// Each step is a bijection of the sum for a given word, and of the word for a given sum.
std::string hash_of(std::span<const std::byte> bytes) {
  constexpr std::uint64_t kPrime = 0x100000001b3, kOffset = 0xcbf29ce484222325;
  std::uint64_t sum = kOffset ^ bytes.size();
  for (size_t i = 0; i < bytes.size(); i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + i, std::min<size_t>(8, bytes.size() - i));
    sum = (sum ^ word) * kPrime;
    sum ^= sum >> 32;
  }
  return fmt::format("{:016x}", sum);
}

} // namespace gdn::trainer::checkpoint
