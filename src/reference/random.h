#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

// Counter-based random numbers: a value is a pure function of where it is used, so a replayed pass
// draws the same numbers and nothing has to be stored. Philox4x32-10 (Salmon et al., SC11).
namespace gdn::reference {

std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter,
                                        std::array<std::uint32_t, 2> key);

// Where a stream of numbers is used. `op` is any stable number of the op or parameter.
struct RandomStream {
  std::uint64_t seed = 0;
  std::uint64_t step = 0;
  std::uint64_t micro_batch = 0;
  std::uint64_t layer = 0;
  std::uint64_t op = 0;

  std::uint64_t bits(std::uint64_t element) const;  // 64 random bits
  double uniform(std::uint64_t element) const;      // [0, 1), 53 bits
  double uniform_open(std::uint64_t element) const; // (0, 1): never 0, never 1
  double normal(std::uint64_t element) const;       // mean 0, variance 1

  std::uint64_t where() const; // step, micro-batch, layer and op as one number, the upper half of Philox's counter
};

// Stable number of a name (FNV-1a), for RandomStream::op.
std::uint64_t stream_id(const char* name, std::size_t length);

} // namespace gdn::reference
