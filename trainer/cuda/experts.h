#pragma once
#include "trainer/comm/expert_counts.h"
#include "trainer/cuda/collectives.h"

// Rows of a mixture of experts on their way between the ranks that hold tokens and those that hold experts.
namespace gdn::trainer::cuda {

// Moves the rows that ExpertCounts counts; rows never visit the host, their numbers do, once per dispatch. Results of
// expert-tensor ranks, parts of sums, go back to where each row came from.
class ExpertRoutes : public ExpertCounts {
public:
  ExpertRoutes(const OpCall& c, Engine& e, std::vector<std::int64_t> sent); // asks
  // As the dispatch of these rows left them in its host table.
  static ExpertRoutes known(const OpCall& c, Engine& e, int dispatch);
  void keep(const OpCall& c) const; // in the host table of this op, a dispatch

  // home -> experts; rows past the last group become zeros. Together.
  void out(const View& home, const GradView& experts) const;
  // experts -> home, summed over expert-tensor ranks; rows at home that were not sent become zeros. Together.
  void back(const View& experts, const GradView& home) const;

private:
  ExpertRoutes(const OpCall& c, Engine& e, std::vector<std::int64_t> sent, std::vector<std::int64_t> counts);
  // Where rows of all ranks, one rank's after another's, lie at the experts.
  Matrix map(LaunchContext& memory) const;

  const OpCall& call_;
  Engine& engine_;
};

} // namespace gdn::trainer::cuda
