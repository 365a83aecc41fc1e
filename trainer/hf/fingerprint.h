#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "trainer/session.h"

namespace gdn::trainer::hf {

// What a run of a checkpoint gives where there is nothing to compare it with: equal weights, tokens,
// stack and dtype give equal lines.
struct Fingerprint {
  std::string name;        // "hidden.1", "logits", "loss"
  double mean_square = 0;
  std::uint64_t hash = 0;  // FNV-1a of the fp32 values
};
// Loss, logits and hidden states of one forward on tokens drawn from `seed`.
std::vector<Fingerprint> fingerprints(const Trace& trace);

// Tokens for it: one sequence of `seq` ids drawn from the seed, labels one token ahead.
Batch drawn_tokens(std::int64_t seq, std::int64_t vocab, std::uint64_t seed);

// Compares the weight files of two folders byte by byte; the name of the first file that differs, or empty.
std::string first_difference(const std::filesystem::path& a, const std::filesystem::path& b);

} // namespace gdn::trainer::hf
