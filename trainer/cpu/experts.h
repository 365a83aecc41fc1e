#pragma once
#include <vector>

#include "trainer/comm/expert_counts.h"
#include "trainer/cpu/collectives.h"

// Rows of a mixture of experts on their way between the ranks that hold tokens and those that hold experts.
namespace gdn::trainer::cpu {

// Moves the rows that ExpertCounts counts. Results of expert-tensor ranks, parts of sums, go back to where each row came
// from.
class ExpertRoutes : public ExpertCounts {
public:
  ExpertRoutes(const OpCall& call, std::vector<std::int64_t> sent); // asks
  ExpertRoutes(const OpCall& call, std::vector<std::int64_t> sent, std::vector<std::int64_t> counts);

  // Scratch of either way for a matrix of `cols` columns; `sent` rows at home, at most `bound` at the experts.
  static Bytes scratch_bytes(const model::Op& op, std::int64_t sent, std::int64_t bound, std::int64_t cols, DType dtype);
  // home -> experts; rows past the last group become zeros. Together.
  void out(const View& home, const GradView& experts, std::span<std::byte> scratch) const;
  // experts -> home, summed over expert-tensor ranks; rows at home that were not sent become zeros. Together.
  void back(const View& experts, const GradView& home, std::span<std::byte> scratch) const;
};

} // namespace gdn::trainer::cpu
