#include "reference/random.h"

#include <cmath>
#include <numbers>

namespace gdn::reference {

std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> c,
                                        std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53u} * c[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57u} * c[2];
    c = {static_cast<std::uint32_t>(b >> 32) ^ c[1] ^ key[0], static_cast<std::uint32_t>(b),
         static_cast<std::uint32_t>(a >> 32) ^ c[3] ^ key[1], static_cast<std::uint32_t>(a)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return c;
}

namespace {

// SplitMix64's finaliser: spreads the fields of a stream over 64 bits.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

std::array<std::uint32_t, 4> block(const RandomStream& s, std::uint64_t element) {
  const std::uint64_t where = s.where();
  return philox4x32({static_cast<std::uint32_t>(element), static_cast<std::uint32_t>(element >> 32),
                     static_cast<std::uint32_t>(where), static_cast<std::uint32_t>(where >> 32)},
                    {static_cast<std::uint32_t>(s.seed), static_cast<std::uint32_t>(s.seed >> 32)});
}

std::uint64_t join(std::uint32_t hi, std::uint32_t lo) { return std::uint64_t{hi} << 32 | lo; }
double to_open(std::uint64_t bits) { // (k + 1/2) / 2^52, k < 2^52: exact, and below 1
  return (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52;
}

} // namespace

std::uint64_t RandomStream::where() const { return mix(mix(mix(mix(step) ^ micro_batch) ^ layer) ^ op); }

std::uint64_t RandomStream::bits(std::uint64_t element) const {
  const auto b = block(*this, element);
  return join(b[1], b[0]);
}

double RandomStream::uniform(std::uint64_t element) const {
  return static_cast<double>(bits(element) >> 11) * 0x1p-53;
}

double RandomStream::uniform_open(std::uint64_t element) const { return to_open(bits(element)); }

double RandomStream::normal(std::uint64_t element) const {
  const auto b = block(*this, element); // Box-Muller, one block a value
  return std::sqrt(-2 * std::log(to_open(join(b[1], b[0])))) *
         std::cos(2 * std::numbers::pi * to_open(join(b[3], b[2])));
}

std::uint64_t stream_id(const char* name, std::size_t length) {
  std::uint64_t h = 0xCBF29CE484222325u;
  for (std::size_t i = 0; i < length; ++i)
    h = (h ^ static_cast<unsigned char>(name[i])) * 0x100000001B3u;
  return h;
}

} // namespace gdn::reference
