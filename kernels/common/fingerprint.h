#pragma once
#include <cstdint>

#include "kernels/common/launch.h"

#ifdef __CUDACC__
#define GDN_HOST_DEVICE __host__ __device__
#else
#define GDN_HOST_DEVICE
#endif

// Comparing memory without moving it: a hash of the bits, and whether all bytes have one value.
namespace gdn::kernels {

// Of 32-bit words: two 64-bit sums over all words of a mix of word and place. Sums have no order, so the value
// is the same on every device and for every grid; a word that changes, or two that change places, change
// both sums but for a chance of about 2^-128.
struct Fingerprint {
  std::uint64_t low = 0, high = 0;
  friend bool operator==(const Fingerprint&, const Fingerprint&) = default;

  GDN_HOST_DEVICE void add(std::uint32_t word, std::uint64_t place) {
    const std::uint64_t x = (place << 32 | word) ^ mix(place >> 32, 0x9e3779b97f4a7c15); // a word and its place, once each
    low += mix(x, 0xd1342543de82ef95);
    high += mix(x, 0xaef17502108ef2d9);
  }

  // Bijective in x: MurmurHash3's finaliser over x and a stream's odd constant.
  GDN_HOST_DEVICE static std::uint64_t mix(std::uint64_t x, std::uint64_t stream) {
    x = x * stream + (stream >> 1);
    x = (x ^ x >> 33) * 0xff51afd7ed558ccd;
    x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53;
    return x ^ x >> 33;
  }
};

// *out = the fingerprint of `words` 32-bit words. data and out in device memory.
void fingerprint(const void* data, std::int64_t words, Fingerprint* out, const LaunchContext& context);

// *other = 1 if one of the bytes is not `value`, else 0. All in device memory.
void find_other(const void* data, std::int64_t bytes, unsigned char value, std::int32_t* other, const LaunchContext& context);

} // namespace gdn::kernels
