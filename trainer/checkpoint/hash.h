#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace gdn::trainer::checkpoint {

// 64-bit check sum of bytes, 16 hexadecimal digits: a change of one 8-byte word never goes unseen,
// others with probability 2^-64. Against damage, not against forgery.
std::string hash_of(std::span<const std::byte> bytes);

} // namespace gdn::trainer::checkpoint
